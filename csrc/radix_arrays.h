// int32 arrays between Python and C++, without a conversion where there need be none.
//
// numpy's C interface costs a few nanoseconds where the buffer protocol costs a hundred, and these calls are short. To
// be included by the one file that has called import_array().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

namespace radixd {

namespace nb = nanobind;

inline nb::object new_array(size_t n, int32_t *&data) {
    npy_intp length = static_cast<npy_intp>(n);
    PyObject *array = PyArray_SimpleNew(1, &length, NPY_INT32);
    if (array == nullptr)
        throw nb::python_error();
    data = static_cast<int32_t *>(PyArray_DATA(reinterpret_cast<PyArrayObject *>(array)));
    return nb::steal(array);
}

inline nb::object array_of(std::span<const int32_t> values) {
    int32_t *data;
    nb::object array = new_array(values.size(), data);
    std::copy(values.begin(), values.end(), data);
    return array;
}

inline nb::object slots_of(std::span<const int32_t> pages, uint32_t page_size) {
    int32_t *slot;
    nb::object array = new_array(pages.size() * page_size, slot);
    for (const int32_t page : pages)
        for (uint32_t i = 0; i < page_size; ++i)
            *slot++ = page * static_cast<int32_t>(page_size) + static_cast<int32_t>(i);
    return array;
}

// Whether it is an int32[n] that can be used as it lies in memory.
inline bool is_plain(nb::handle object) {
    if (!PyArray_Check(object.ptr()))
        return false;
    auto *array = reinterpret_cast<PyArrayObject *>(object.ptr());
    return PyArray_NDIM(array) == 1 && PyArray_TYPE(array) == NPY_INT32 && PyArray_IS_C_CONTIGUOUS(array) &&
           PyArray_ISBEHAVED_RO(array);
}

inline std::span<int32_t> span_of(nb::handle object) {
    auto *array = reinterpret_cast<PyArrayObject *>(object.ptr());
    return {static_cast<int32_t *>(PyArray_DATA(array)), static_cast<size_t>(PyArray_DIM(array, 0))};
}

// Integers that a caller passed, in place or converted by kvcache.arguments, which words the errors.
class Integers {
  public:
    Integers(nb::handle values, const char *name) {
        if (!is_plain(values)) {
            const nb::object converted = nb::module_::import_("kvcache.arguments").attr("as_int32")(values, name);
            owner_ = nb::steal(PyArray_FROM_OTF(converted.ptr(), NPY_INT32, NPY_ARRAY_IN_ARRAY));
            if (!owner_.is_valid())
                throw nb::python_error();
            values = owner_;
        }
        values_ = span_of(values);
    }
    std::span<const int32_t> get() const { return values_; }

  private:
    nb::object owner_;
    std::span<const int32_t> values_;
};

inline std::span<int32_t> row_of(nb::handle row) {
    if (!is_plain(row) || !PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject *>(row.ptr())))
        throw nb::type_error("row must be a writable, contiguous, one-dimensional int32 array");
    return span_of(row);
}

} // namespace radixd

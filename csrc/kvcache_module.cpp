// kvcache._core: the native part of the prefix cache, bound with nanobind. The tree is in radix_bindings.cpp.
//
// Arguments of the key compare are checked here and nowhere below. No array is converted or copied: a hidden conversion
// would cost more than the comparison, so anything but two matching contiguous integer arrays is a TypeError.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "key_compare.h"
#include "radix_bindings.h"

namespace nb = nanobind;

namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;

void check_ids(const Array &array, const char *name) {
    const auto refuse = [name](const char *what) { throw nb::type_error((std::string(name) + what).c_str()); };
    if (array.ndim() != 1)
        refuse(" must be one-dimensional");
    if (array.dtype() != nb::dtype<int32_t>() && array.dtype() != nb::dtype<int64_t>())
        refuse(" must be int32 or int64");
    if (array.shape(0) > 1 && array.stride(0) != 1)
        refuse(" must be contiguous");
}

size_t common_prefix(radixd::CompareFunction compare, const Array &x, const Array &y) {
    check_ids(x, "x");
    check_ids(y, "y");
    if (x.dtype() != y.dtype())
        throw nb::type_error("x and y must have the same dtype");
    const size_t words_per_id = x.itemsize() / sizeof(uint32_t);
    const size_t words = std::min(x.shape(0), y.shape(0)) * words_per_id;
    return compare(static_cast<const uint32_t *>(x.data()), static_cast<const uint32_t *>(y.data()), words) /
           words_per_id;
}

size_t fast_compare_key(const Array &x, const Array &y) { return common_prefix(radixd::best_compare(), x, y); }

size_t compare_with(std::string_view path_name, const Array &x, const Array &y) {
    for (const radixd::ComparePath &path : radixd::compare_paths)
        if (path.name == path_name && path.supported())
            return common_prefix(path.compare, x, y);
    throw nb::value_error(("this machine has no comparison path '" + std::string(path_name) + "'").c_str());
}

std::vector<std::string> compare_path_names() {
    std::vector<std::string> names;
    for (const radixd::ComparePath &path : radixd::compare_paths)
        if (path.supported())
            names.emplace_back(path.name);
    return names;
}

} // namespace

NB_MODULE(_core, m) {
    // At exit the interpreter may end before every module is torn down; that is no leak.
    nb::set_leak_warnings(false);
    m.doc() = "The native part of the prefix cache.";
    m.def("fast_compare_key", &fast_compare_key, nb::arg("x"), nb::arg("y"),
          "Length of the common prefix of two contiguous 1-D arrays, both int32 or both int64; TypeError otherwise.");
    m.def("compare_with", &compare_with, nb::arg("path_name"), nb::arg("x"), nb::arg("y"),
          "fast_compare_key by the named path, for tests; ValueError if this machine cannot run it.");
    m.def("compare_paths", &compare_path_names, "Names of the paths that this machine can run, the preferred first.");
    bind_radix_tree(m);
}

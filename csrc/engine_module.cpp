// engine._kernels: what the CPU engine calls for each layer.
//
// Torch tensors come as addresses (data_ptr()): passing the objects through DLPack costs more than a small batch's
// whole call. The Python side (engine/attention/native.py) has checked what an address cannot tell: dtype, shape and
// stride. Page tables are numpy arrays and carry their own; nothing is converted or copied. The GIL is released while
// it computes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "paged_attention.h"

namespace nb = nanobind;

namespace {

using Vector = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::tuple path_names() {
  nb::list names;
  for (const radixd::AttentionPath* path : radixd::attention_paths()) {
    names.append(path->name);
  }
  return nb::tuple(names);
}

void attend(radixd::PagedAttention& attention, std::uintptr_t out, std::uintptr_t query, std::uintptr_t key_pool,
            std::uintptr_t value_pool, const Vector& query_starts, const Vector& context_lens, const Table& pages,
            std::int64_t tokens, std::int64_t query_heads, std::int64_t kv_heads, std::int64_t head_dim,
            std::int64_t num_pages, std::int64_t page_size, float scale, bool bfloat16) {
  radixd::AttentionProblem problem;
  problem.out = reinterpret_cast<void*>(out);
  problem.query = reinterpret_cast<const void*>(query);
  problem.key_pool = reinterpret_cast<const void*>(key_pool);
  problem.value_pool = reinterpret_cast<const void*>(value_pool);
  problem.query_starts = query_starts.data();
  problem.context_lens = context_lens.data();
  problem.pages = pages.data();
  problem.tokens = tokens;
  problem.sequences = static_cast<std::int64_t>(context_lens.shape(0));
  problem.pages_per_sequence = static_cast<std::int64_t>(pages.shape(1));
  problem.num_pages = num_pages;
  problem.page_size = page_size;
  problem.query_heads = query_heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.scale = scale;
  problem.type = bfloat16 ? radixd::ElementType::kBFloat16 : radixd::ElementType::kFloat32;
  if (query_starts.shape(0) != context_lens.shape(0) + 1 || pages.shape(0) != context_lens.shape(0)) {
    throw std::invalid_argument("query_starts must be [B + 1], context_lens [B] and pages [B, P]");
  }
  const nb::gil_scoped_release release;
  attention.attend(problem);
}

}  // namespace

NB_MODULE(_kernels, module) {
  // At exit the interpreter may end before every module is torn down; that is no leak.
  nb::set_leak_warnings(false);
  module.doc() = "CPU kernels of the engine.";
  module.def("attention_paths", &path_names,
             "Names of the instruction-set paths that this CPU can run, fastest first.");
  nb::class_<radixd::PagedAttention>(module, "PagedAttention",
                                     "Paged attention with its own threads; see engine/attention/native.py.")
      .def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("path") = "")
      .def_prop_ro("path", [](const radixd::PagedAttention& self) { return self.path().name; })
      .def_prop_ro("threads", &radixd::PagedAttention::threads)
      .def("attend", &attend, nb::arg("out"), nb::arg("query"), nb::arg("key_pool"), nb::arg("value_pool"),
           nb::arg("query_starts").noconvert(), nb::arg("context_lens").noconvert(), nb::arg("pages").noconvert(),
           nb::arg("tokens"), nb::arg("query_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("num_pages"),
           nb::arg("page_size"), nb::arg("scale"), nb::arg("bfloat16"));
}

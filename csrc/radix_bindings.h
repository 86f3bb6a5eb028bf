// kvcache._core's part that is the radix tree.
#pragma once

#include <nanobind/nanobind.h>

void bind_radix_tree(nanobind::module_ &m);

// The attention kernels that this build holds, one per instruction set.
//
// A path is plain data, and whether this CPU can run it is decided in paged_attention.cpp: no code of a kernel's file
// may run, not even to ask, before that is known.

#pragma once

#include "attention_tile.h"

namespace radixd {

extern const AttentionPath kPortablePath;
#if defined(RADIXD_X86_PATHS)
extern const AttentionPath kAvx2Path;
extern const AttentionPath kAvx512Path;
#endif

}  // namespace radixd

// Errors of the radix tree, each with its equal in kvcache/base.py. Wrong arguments are std::invalid_argument.
#pragma once

#include <stdexcept>

namespace radixd {

// An invariant does not hold, or the caller gave back what it never had.
struct IntegrityError : std::logic_error {
    using std::logic_error::logic_error;
};

// More was asked of evict() than is evictable; nothing was changed.
struct NotEnoughEvictableError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

} // namespace radixd

// RadixTree and RadixHandle for Python; kvcache/radix.py says what they promise, and checks nothing itself.
//
// The calls of the serving path take microseconds, so what surrounds them counts: int32 arrays are read and written in
// place, results are at most one new object, and an empty result is always the same array.
#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "radix_arrays.h"
#include "radix_bindings.h"
#include "radix_tree.h"

namespace nb = nanobind;

namespace {

using radixd::array_of;
using radixd::Integers;
using radixd::new_array;
using radixd::Place;
using radixd::Priority;
using radixd::RadixTree;
using radixd::row_of;
using radixd::slots_of;
using radixd::Tokens;

struct Tree {
    RadixTree tree;
    nb::object no_pages; // int32[0]
};

// Keeps its tree alive.
struct Handle {
    nb::object owner;
    Tree *tree;
    Place place;
};

using Self = nb::handle_t<Tree>;
Tree &tree_of(Self self) { return *nb::inst_ptr<Tree>(self); }

nb::object freed_pages(const Tree &self) {
    const std::span<const int32_t> freed = self.tree.freed();
    return freed.empty() ? self.no_pages : array_of(freed);
}

nb::object freed_slots(const Tree &self) {
    const std::span<const int32_t> freed = self.tree.freed();
    return freed.empty() ? self.no_pages : slots_of(freed, self.tree.page_size());
}

std::string_view name_of(const nb::bytes &name) { return {name.c_str(), name.size()}; }

Priority priority_of(int64_t priority) {
    if (priority < 0 || priority > radixd::max_priority)
        throw std::invalid_argument("priority must be in [0, " + std::to_string(radixd::max_priority) + "], not " +
                                    std::to_string(priority));
    return static_cast<Priority>(priority);
}

uint64_t not_negative(int64_t value, const char *name) {
    if (value < 0)
        throw std::invalid_argument(std::string(name) + " must not be negative, but is " + std::to_string(value));
    return static_cast<uint64_t>(value);
}

uint64_t pages_up(int64_t tokens, uint32_t page_size, const char *name) {
    return (not_negative(tokens, name) + page_size - 1) / page_size;
}

Place &place_of(const Tree &self, Handle &handle) {
    if (handle.tree != &self)
        throw std::invalid_argument("a handle of another cache");
    return handle.place;
}

nb::object new_handle(Self self, const Place &place) {
    return nb::cast(Handle{nb::borrow(self), &tree_of(self), place}, nb::rv_policy::move);
}

// Whole pages, each in order from its first slot.
void check_slots(Tokens ids, Tokens slots, uint32_t page_size) {
    if (ids.size() != slots.size())
        throw std::invalid_argument(std::to_string(ids.size()) + " ids but " + std::to_string(slots.size()) + " slots");
    const size_t whole = ids.size() / page_size * page_size;
    for (size_t first = 0; first < whole; first += page_size) {
        bool in_order = slots[first] >= 0 && slots[first] % static_cast<int32_t>(page_size) == 0;
        for (size_t i = 1; i < page_size; ++i)
            in_order &= int64_t{slots[first + i]} == int64_t{slots[first]} + static_cast<int64_t>(i);
        if (!in_order)
            throw std::invalid_argument("slots must be whole pages of " + std::to_string(page_size) +
                                        " slots, each in order from the page's first slot");
    }
}

// Lookups and inserts.

nb::object match(Self self, nb::handle ids, const nb::bytes &name_space, int64_t priority) {
    const Integers tokens(ids, "ids");
    return new_handle(self, tree_of(self).tree.match(tokens.get(), name_of(name_space), priority_of(priority)));
}

size_t peek(const Tree &self, nb::handle ids, const nb::bytes &name_space) {
    return size_t{self.tree.peek(Integers(ids, "ids").get(), name_of(name_space))} * self.tree.page_size();
}

nb::object insert(Self self, nb::handle ids, nb::handle slots, const nb::bytes &name_space, int64_t priority) {
    RadixTree &tree = tree_of(self).tree;
    const Integers tokens(ids, "ids"), token_slots(slots, "slots");
    check_slots(tokens.get(), token_slots.get(), tree.page_size());
    const RadixTree::Inserted inserted = tree.insert(tokens.get(), {token_slots.get().data(), tree.page_size()},
                                                     name_of(name_space), priority_of(priority));
    return nb::make_tuple(size_t{inserted.already} * tree.page_size(), new_handle(self, inserted.place));
}

nb::object admit(Self self, nb::handle ids, nb::handle row, const nb::bytes &name_space, int64_t priority,
                 int64_t required) {
    const Integers tokens(ids, "ids");
    Place place;
    if (!tree_of(self).tree.admit(tokens.get(), name_of(name_space), priority_of(priority),
                                  required < 0 ? 0 : static_cast<uint64_t>(required), row_of(row), place))
        return nb::none();
    return new_handle(self, place);
}

nb::object commit(Tree &self, nb::handle ids, nb::handle row, Handle &handle, const nb::bytes &name_space) {
    const Integers tokens(ids, "ids");
    self.tree.commit(tokens.get(), row_of(row), name_of(name_space), nullptr, place_of(self, handle));
    return freed_pages(self);
}

nb::object finish(Tree &self, nb::handle ids, nb::handle row, Handle &handle, const nb::bytes &name_space,
                  std::optional<int64_t> prompt_len, std::optional<int64_t> output_len) {
    const Integers tokens(ids, "ids");
    const uint64_t prompt = prompt_len ? not_negative(*prompt_len, "prompt_len") : tokens.get().size();
    const uint64_t output = output_len    ? not_negative(*output_len, "output_len")
                            : !prompt_len ? radixd::unknown_length
                                          : tokens.get().size() - std::min<uint64_t>(prompt, tokens.get().size());
    const radixd::Request request{prompt, output};
    self.tree.commit(tokens.get(), row_of(row), name_of(name_space), &request, place_of(self, handle));
    return freed_pages(self);
}

// Many at once. Everything is checked before anything is done.

template <class Item> std::vector<Item> list_of(const nb::sequence &items, size_t n, const char *name) {
    if (nb::len(items) != n)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(nb::len(items)) + " entries, not " +
                                    std::to_string(n));
    std::vector<Item> list;
    for (const nb::handle item : items) {
        Item value;
        if (!nb::try_cast<Item>(item, value))
            throw nb::type_error((std::string(name) + " has an entry of another type").c_str());
        list.push_back(std::move(value));
    }
    return list;
}

std::vector<Integers> integers_of(const nb::sequence &items) {
    std::vector<Integers> list;
    for (const nb::handle item : items)
        list.emplace_back(item, "ids");
    return list;
}

nb::object peek_many(const Tree &self, const nb::sequence &ids, const nb::sequence &namespaces) {
    const std::vector<Integers> tokens = integers_of(ids);
    const auto names = list_of<nb::bytes>(namespaces, tokens.size(), "namespaces");
    int32_t *lengths;
    nb::object array = new_array(tokens.size(), lengths);
    for (size_t i = 0; i < tokens.size(); ++i)
        lengths[i] = static_cast<int32_t>(self.tree.peek(tokens[i].get(), name_of(names[i])) * self.tree.page_size());
    return array;
}

nb::object admit_many(Self self, const nb::sequence &ids, const nb::sequence &rows, const nb::sequence &namespaces) {
    RadixTree &tree = tree_of(self).tree;
    const std::vector<Integers> tokens = integers_of(ids);
    const auto row_objects = list_of<nb::object>(rows, tokens.size(), "rows");
    const auto names = list_of<nb::bytes>(namespaces, tokens.size(), "namespaces");
    for (size_t i = 0; i < tokens.size(); ++i)
        if (row_of(row_objects[i]).size() < tokens[i].get().size() / tree.page_size())
            throw std::invalid_argument("row " + std::to_string(i) + " has no room for all pages of its ids");
    nb::list handles;
    for (size_t i = 0; i < tokens.size(); ++i) {
        Place place;
        tree.admit(tokens[i].get(), name_of(names[i]), 0, 0, row_of(row_objects[i]), place);
        handles.append(new_handle(self, place));
    }
    return handles;
}

nb::object commit_many(Tree &self, const nb::sequence &ids, const nb::sequence &rows, const nb::sequence &handles,
                       const nb::sequence &namespaces, const nb::sequence &finished) {
    const std::vector<Integers> tokens = integers_of(ids);
    const size_t n = tokens.size();
    const auto row_objects = list_of<nb::object>(rows, n, "rows");
    const auto ends = list_of<Handle *>(handles, n, "handles");
    const auto names = list_of<nb::bytes>(namespaces, n, "namespaces");
    const auto ending = list_of<bool>(finished, n, "finished");
    for (size_t i = 0; i < n; ++i) {
        if (ends[i] == nullptr)
            throw nb::type_error("handles must be handles of a radix cache");
        if (std::count(ends.begin(), ends.end(), ends[i]) > 1)
            throw std::invalid_argument("a handle is given twice");
        self.tree.check_commit(tokens[i].get(), row_of(row_objects[i]), place_of(self, *ends[i]));
    }
    std::vector<int32_t> freed;
    for (size_t i = 0; i < n; ++i) {
        const radixd::Request request{tokens[i].get().size(), radixd::unknown_length};
        self.tree.commit(tokens[i].get(), row_of(row_objects[i]), name_of(names[i]), ending[i] ? &request : nullptr,
                         ends[i]->place);
        freed.insert(freed.end(), self.tree.freed().begin(), self.tree.freed().end());
    }
    return array_of(freed);
}

// Locks, eviction, forgetting.

void lock(Tree &self, Handle &handle) { self.tree.lock(place_of(self, handle)); }

void unlock(Tree &self, Handle &handle) { self.tree.unlock(place_of(self, handle)); }

nb::object unlock_pages(Tree &self, Handle &handle) {
    unlock(self, handle);
    return freed_pages(self);
}

nb::object unlock_slots(Tree &self, Handle &handle) {
    unlock(self, handle);
    return freed_slots(self);
}

nb::object evict_pages(Tree &self, int64_t n) {
    const uint64_t pages = not_negative(n, "n");
    if (pages > self.tree.evictable_pages())
        self.tree.evict(pages, nullptr); // says so
    int32_t *data;
    nb::object array = new_array(pages, data);
    self.tree.evict(pages, data);
    return array;
}

nb::object evict_slots(Tree &self, int64_t n) {
    const uint32_t page_size = self.tree.page_size();
    const uint64_t pages = pages_up(n, page_size, "n");
    if (pages > self.tree.evictable_pages())
        self.tree.evict(pages, nullptr); // says so
    int32_t *slots;
    nb::object array = new_array(pages * page_size, slots);
    // The page numbers go to the end of the array, which their slots reach last.
    int32_t *page = slots + pages * (page_size - 1);
    self.tree.evict(pages, page);
    for (uint64_t i = 0; i < pages; ++i) {
        const int32_t first = page[i] * static_cast<int32_t>(page_size);
        for (uint32_t at = 0; at < page_size; ++at)
            *slots++ = first + static_cast<int32_t>(at);
    }
    return array;
}

nb::object reset(Tree &self, const std::optional<nb::bytes> &name_space) {
    if (name_space)
        self.tree.reset(name_of(*name_space));
    else
        self.tree.reset();
    return freed_slots(self);
}

nb::object discard(Tree &self, Handle &handle, int64_t keep) {
    const uint64_t pages = pages_up(keep, self.tree.page_size(), "keep");
    self.tree.discard(place_of(self, handle), pages);
    return freed_slots(self);
}

// What there is.

nb::object matched_slots(const Handle &handle) {
    std::vector<int32_t> pages(handle.place.end);
    handle.tree->tree.gather(handle.place, pages.data());
    return slots_of(pages, handle.tree->tree.page_size());
}

nb::object matched_pages(const Handle &handle) {
    std::vector<int32_t> pages(handle.place.end);
    handle.tree->tree.gather(handle.place, pages.data());
    return array_of(pages);
}

nb::object stats(const Tree &self) {
    const radixd::TreeCounters &counters = self.tree.counters();
    nb::list evicted;
    for (const uint64_t pages : self.tree.evicted_pages())
        evicted.append(pages);
    return nb::make_tuple(counters.lookups, counters.lookup_tokens, counters.hit_tokens, counters.inserted_tokens,
                          nb::tuple(evicted), self.tree.node_count(), self.tree.namespace_count(),
                          self.tree.metadata_bytes());
}

nb::object top_prefixes(const Tree &self, int64_t n) {
    nb::list prefixes;
    for (const radixd::HotPrefix &prefix : self.tree.top_prefixes(not_negative(n, "n")))
        prefixes.append(nb::make_tuple(nb::bytes(prefix.name_space.data(), prefix.name_space.size()),
                                       array_of(prefix.tokens), array_of(prefix.pages), prefix.hits));
    return prefixes;
}

nb::object policies() {
    nb::list names;
    for (const std::string_view name : radixd::policy_names())
        names.append(nb::str(name.data(), name.size()));
    return nb::tuple(names);
}

void raise(const char *type, const char *message) {
    try {
        PyErr_SetString(nb::module_::import_("kvcache.base").attr(type).ptr(), message);
    } catch (nb::python_error &error) {
        error.restore();
    }
}

void translate(const std::exception_ptr &thrown, void *) {
    try {
        std::rethrow_exception(thrown);
    } catch (const radixd::IntegrityError &error) {
        raise("IntegrityError", error.what());
    } catch (const radixd::NotEnoughEvictableError &error) {
        raise("NotEnoughEvictableError", error.what());
    }
}

void new_tree(Tree *self, uint32_t page_size, const std::string &policy, uint64_t hash_seed, bool constant_hash) {
    int32_t *nothing;
    const radixd::TreeOptions options{page_size, policy, hash_seed, constant_hash};
    new (self) Tree{RadixTree(options), new_array(0, nothing)};
}

bool import_numpy() {
    import_array1(false);
    return true;
}

} // namespace

void bind_radix_tree(nb::module_ &m) {
    using namespace nb::literals;
    if (!import_numpy())
        throw nb::python_error();
    nb::register_exception_translator(translate);
    m.def("policies", &policies, "Names of the eviction policies; the first is the default.");

    nb::class_<Handle>(m, "RadixHandle")
        .def_prop_ro("cached_len",
                     [](const Handle &self) { return size_t{self.place.end} * self.tree->tree.page_size(); })
        .def_prop_ro("attached", [](const Handle &self) { return self.tree->tree.is_attached(self.place); })
        .def("get_matched_indices", &matched_slots)
        .def("get_matched_pages", &matched_pages);

    nb::class_<Tree>(m, "RadixTree")
        .def("__init__", &new_tree, "page_size"_a, "policy"_a, "hash_seed"_a, "constant_hash"_a)
        .def("match", &match, "ids"_a, "namespace"_a, "priority"_a)
        .def("peek", &peek, "ids"_a, "namespace"_a)
        .def("peek_many", &peek_many, "ids"_a, "namespaces"_a)
        .def("insert", &insert, "ids"_a, "slots"_a, "namespace"_a, "priority"_a)
        .def("admit", &admit, "ids"_a, "row"_a, "namespace"_a, "priority"_a, "required"_a)
        .def("admit_many", &admit_many, "ids"_a, "rows"_a, "namespaces"_a)
        .def("commit", &commit, "ids"_a, "row"_a, "handle"_a, "namespace"_a)
        .def("finish", &finish, "ids"_a, "row"_a, "handle"_a, "namespace"_a, "prompt_len"_a.none(),
             "output_len"_a.none())
        .def("commit_many", &commit_many, "ids"_a, "rows"_a, "handles"_a, "namespaces"_a, "finished"_a)
        .def("lock", &lock, "handle"_a)
        .def("unlock", &unlock_slots, "handle"_a)
        .def("unlock_pages", &unlock_pages, "handle"_a)
        .def("evict", &evict_slots, "n"_a)
        .def("evict_pages", &evict_pages, "n"_a)
        .def("reset", &reset, "namespace"_a.none())
        .def("discard", &discard, "handle"_a, "keep"_a)
        .def_prop_ro("evictable_pages", [](const Tree &self) { return self.tree.evictable_pages(); })
        .def_prop_ro("protected_pages", [](const Tree &self) { return self.tree.protected_pages(); })
        .def_prop_ro("node_count", [](const Tree &self) { return self.tree.node_count(); })
        .def_prop_ro("namespace_count", [](const Tree &self) { return self.tree.namespace_count(); })
        .def("held_slots",
             [](const Tree &self) { return slots_of(self.tree.held_pages(), self.tree.page_size()); })
        .def("stats", &stats)
        .def("top_prefixes", &top_prefixes, "n"_a)
        .def("check", [](const Tree &self) { self.tree.check(); });
}

#include "filter_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "segments.hpp"

namespace kv {

namespace {

constexpr uint32_t SLOTS = 4;
constexpr uint32_t STASH_MAX = 8;   // past it the filter is saturated and says nothing

uint64_t sum_of(FilterHead head, const uint8_t* table, size_t table_bytes, const std::vector<FilterHomeless>& stash) {
  head.sum = 0;
  XXH3_state_t s;
  XXH3_64bits_reset(&s);
  XXH3_64bits_update(&s, &head, sizeof head);
  XXH3_64bits_update(&s, table, table_bytes);
  XXH3_64bits_update(&s, stash.data(), stash.size() * sizeof(FilterHomeless));
  return XXH3_64bits_digest(&s);
}

}  // namespace

std::string filter_path(const std::string& dir) { return dir + "/filter"; }

bool save_filter(const std::string& dir, const CuckooFilter& filter, const FilterState& state) {
  FilterHead head{};
  head.magic = FILTER_MAGIC;
  head.version = FILTER_VERSION;
  head.slots = SLOTS;
  head.state = state;
  head.buckets = filter.buckets();
  head.stash = uint32_t(filter.stash().size());
  head.keys = filter.count();
  std::vector<FilterHomeless> stash;
  for (const auto& [bucket, fingerprint] : filter.stash()) stash.push_back({bucket, fingerprint});
  const size_t table_bytes = size_t(head.buckets) * CuckooFilter::BUCKET_BYTES, stash_bytes = stash.size() * sizeof(FilterHomeless);
  head.sum = sum_of(head, filter.table(), table_bytes, stash);
  const std::string path = filter_path(dir), draft = path + ".new";
  const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  const auto write = [&](const void* bytes, size_t count, size_t offset) {
    return SegmentFiles::write_all(fd, static_cast<const uint8_t*>(bytes), count, offset);
  };
  const bool written = write(&head, sizeof head, 0) && write(filter.table(), table_bytes, sizeof head) &&
                       write(stash.data(), stash_bytes, sizeof head + table_bytes) && fsync(fd) == 0;
  ::close(fd);
  if (written && rename(draft.c_str(), path.c_str()) == 0) return true;
  unlink(draft.c_str());
  return false;
}

std::unique_ptr<CuckooFilter> load_filter(const std::string& dir, const FilterState& state, std::string& why) {
  const int fd = ::open(filter_path(dir).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return why = "missing", nullptr;
  std::unique_ptr<CuckooFilter> filter;
  FilterHead head{};
  struct stat st{};
  const auto read = [&](void* bytes, size_t count, size_t offset) {
    return SegmentFiles::read_all(fd, static_cast<uint8_t*>(bytes), count, offset);
  };
  const auto fault = [&]() -> std::string {
    if (fstat(fd, &st) != 0 || uint64_t(st.st_size) < sizeof head) return "cut short";
    if (!read(&head, sizeof head, 0)) return "unreadable";
    if (head.magic != FILTER_MAGIC) return "not a filter";
    if (head.version != FILTER_VERSION || head.slots != SLOTS) return "of another version";
    if (!state.stop || head.state.stop != state.stop || head.state.last_txn != state.last_txn) return "of another state of the index";
    const size_t table_bytes = size_t(head.buckets) * CuckooFilter::BUCKET_BYTES;
    if (!head.buckets || head.stash > STASH_MAX ||
        uint64_t(st.st_size) != sizeof head + table_bytes + head.stash * sizeof(FilterHomeless))
      return "cut short, or longer than it says";
    std::vector<uint8_t> table(table_bytes + 8);
    std::vector<FilterHomeless> stash(head.stash);
    if (!read(table.data(), table_bytes, sizeof head) ||
        !read(stash.data(), stash.size() * sizeof(FilterHomeless), sizeof head + table_bytes))
      return "unreadable";
    if (head.sum != sum_of(head, table.data(), table_bytes, stash)) return "damaged";
    CuckooFilter::Stash homeless;
    for (const FilterHomeless& h : stash) {
      if (h.bucket >= head.buckets || !h.fingerprint || h.fingerprint > 0xfff) return "damaged";
      homeless.emplace_back(h.bucket, uint16_t(h.fingerprint));
    }
    filter = std::make_unique<CuckooFilter>(head.buckets, head.keys, std::move(table), std::move(homeless));
    if (filter->slots_used() == head.keys) return "";
    filter.reset();
    return "at odds with its own counts";
  };
  why = fault();
  ::close(fd);
  return filter;
}

}  // namespace kv

// Every verb of a store at once, from many threads, for the sanitizers: test_store_sanitized.py builds and runs it.
//
//   store_stress DIR SECONDS SEED      exit 0: sound at the end, and after a clean and an unclean restart
//
// Not covered: a full disk, damaged bytes (tests/test_store_damage.py), several processes.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "store_impl.hpp"

using namespace kv;

namespace {


// A sound record whose bytes follow from `number`; few keys, so that writings meet.
void make(uint32_t number, uint8_t* out, uint64_t& bytes) {
  std::mt19937_64 rng(number);
  const uint32_t blocks = 1 + number % 5, planes = 2, k = 10, plane_bytes = 640 + 320 * (number % 7);
  auto& h = *reinterpret_cast<RecordHead*>(out);
  std::memset(out, 0, sizeof h);
  h.magic = RECORD_MAGIC;
  h.version = RECORD_VERSION;
  h.head_bytes = head_bytes_of(planes, 2, blocks);
  h.owner[0] = uint8_t(number % 2);
  for (int i = 0; i < 4; i++) {
    const uint64_t part = XXH3_64bits_withSeed("key", 3, number / 3 % 400 + uint64_t(i) * 1000);
    std::memcpy(h.extent_key + 8 * i, &part, 8);
  }
  h.write_id = number;
  h.shard = uint8_t(number % 12);
  h.k = k, h.m = 2, h.plane_count = planes;
  h.block_count = uint16_t(blocks);
  h.earlier_count = 2;
  h.start_block = number % 64;
  h.bucket = number / 50;
  h.retention_class = uint8_t(1 + number % 3);
  h.block_bytes = planes * plane_bytes;
  const uint32_t shard_bytes = shard_bytes_of(plane_bytes, k);
  auto* table = reinterpret_cast<PlaneEntry*>(out + sizeof h);
  for (uint32_t p = 0; p < planes; p++) table[p] = {plane_bytes, shard_bytes};
  auto* earlier = reinterpret_cast<uint32_t*>(table + planes);
  earlier[0] = 1, earlier[1] = 2;
  auto* tags = reinterpret_cast<uint64_t*>(out + h.head_bytes) - blocks;
  for (uint32_t b = 0; b < blocks; b++) tags[b] = b ? rng() : block_tag(h.extent_key);
  auto* sums = reinterpret_cast<uint64_t*>(out + h.head_bytes);
  uint8_t* piece = out + h.head_bytes + checks_bytes_of(planes, blocks);
  std::memset(sums, 0, checks_bytes_of(planes, blocks));
  ShardIdentity id{};
  std::memcpy(id.owner, h.owner, OWNER_BYTES);
  std::memcpy(id.extent_key, h.extent_key, KEY_BYTES);
  id.write_id = h.write_id;
  id.shard = h.shard;
  for (id.plane = 0; id.plane < planes; id.plane++)
    for (id.block = 0; id.block < blocks; id.block++, piece += shard_bytes) {
      for (uint32_t at = 0; at < shard_bytes; at += 8) {
        const uint64_t word = rng();
        std::memcpy(piece + at, &word, 8);
      }
      sums[id.plane * blocks + id.block] = shard_sum(piece, shard_bytes, shard_seed(id));
    }
  bytes = uint64_t(piece - out);
  h.record_bytes = bytes;
  h.checks_sum = XXH3_64bits(out + h.head_bytes, checks_bytes_of(planes, blocks));
  h.head_sum = head_sum_of(out, h.head_bytes);
}

[[noreturn]] void fail(const char* what, uint32_t number) {
  fprintf(stderr, "%s (record %u)\n", what, number);
  std::abort();
}

void require_sound(StoreImpl& store) {
  if (!store.wait_started(60)) fail("the start scan did not end", 0);
  for (const std::string& problem : store.check_integrity(true)) fail(problem.c_str(), 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  StoreConfig config;
  config.dir = argv[1];
  config.segment_bytes = 1 << 20;
  config.capacity_bytes = 12 << 20;
  config.virtual_clock = true;
  const double seconds = atof(argv[2]);
  const auto seed = uint32_t(atoi(argv[3]));
  for (int round = 0; round < 3; round++) {
    StoreImpl store(config);
    std::atomic<bool> stop{false};
    std::atomic<uint32_t> newest{uint32_t(round) * 1000000 + 1};
    std::atomic<uint64_t> reads{0};
    std::vector<std::thread> threads;
    const auto any = [&](std::mt19937& rng) { return newest - std::min<uint32_t>(newest - 1, rng() % 3000); };
    for (uint32_t t = 0; t < 3; t++)
      threads.emplace_back([&] {   // writes
        std::vector<uint64_t> words(8192);
        auto* record = static_cast<uint8_t*>(aligned_alloc(RECORD_ALIGN, 65536));
        while (!stop) {
          uint64_t bytes = 0;
          make(newest++, record, bytes);
          store.put(record, bytes);
        }
        free(record);
      });
    for (uint32_t t = 0; t < 2; t++)
      threads.emplace_back([&, t] {   // finds, promises, reads, and keeps some reads open
        std::mt19937 rng(seed + t);
        std::vector<uint64_t> head(8192), there(8192);
        auto* record = reinterpret_cast<uint8_t*>(head.data());
        std::vector<std::pair<ReadRef, uint32_t>> open;
        while (!stop) {
          const uint32_t number = any(rng);
          uint64_t bytes = 0;
          make(number, record, bytes);
          const RecordHead& h = RecordView{record}.head();
          Owner owner;
          std::memcpy(owner.data(), h.owner, OWNER_BYTES);
          std::vector<uint8_t> found;
          store.discover(owner, h.extent_key, 1, found);
          wire::PromiseRequest request{};
          std::memcpy(request.owner, h.owner, OWNER_BYTES);
          request.count = 1;
          request.bucket = number / 50 + 1;
          request.flags = uint8_t(rng() % 4);
          request.retention_class = 2;
          request.pin_seconds = 1;
          wire::WritingName name{};
          std::memcpy(name.extent_key, h.extent_key, KEY_BYTES);
          name.write_id = h.write_id;
          wire::PromiseAnswer answer{};
          store.promise(request, &name, &answer);
          wire::ReadExtent extent{};
          std::memcpy(extent.extent_key, h.extent_key, KEY_BYTES);
          extent.write_id = h.write_id;
          extent.shard = h.shard;
          ReadRef ref;
          if (store.open_read(owner, extent, ref) == Status::OK) open.emplace_back(std::move(ref), number);
          if (open.size() > 40 || (rng() % 8 == 0 && !open.empty())) {
            const size_t at = rng() % open.size();
            make(open[at].second, record, bytes);
            const ReadRef& held = open[at].first;
            if (held.record_bytes != bytes) fail("another record's length", open[at].second);
            auto* got = reinterpret_cast<uint8_t*>(there.data());
            if (!SegmentFiles::read_all(held.fd(), got, bytes, held.offset)) fail("unreadable", open[at].second);
            if (std::memcmp(got, record, bytes) != 0) fail("bytes of an open read changed", open[at].second);
            open.erase(open.begin() + ptrdiff_t(at));
            reads++;
          }
        }
      });
    threads.emplace_back([&] {   // evicts
      while (!stop) {
        store.wait_pressure(0.05);
        for (const auto& [queue, totals] : store.queues()) {
          std::vector<RecencyKey> rows;
          for (const PeekedRow& row : store.peek(queue, 50, nullptr)) rows.push_back(row.row);
          if (store.used_bytes() > config.capacity_bytes * 8 / 10) store.evict(rows, GhostReason::EVICTED);
        }
        store.stats();
      }
    });
    threads.emplace_back([&] {   // withdraws, reports
      std::mt19937 rng(seed + 9);
      std::vector<uint64_t> words(8192);
      auto* record = reinterpret_cast<uint8_t*>(words.data());
      while (!stop) {
        uint64_t bytes = 0;
        make(any(rng), record, bytes);
        const RecordHead& h = RecordView{record}.head();
        Owner owner;
        std::memcpy(owner.data(), h.owner, OWNER_BYTES);
        wire::WritingName name{};
        std::memcpy(name.extent_key, h.extent_key, KEY_BYTES);
        name.write_id = h.write_id;
        uint32_t status = 0;
        wire::SuspectShard shard{};
        std::memcpy(shard.extent_key, h.extent_key, KEY_BYTES);
        shard.write_id = h.write_id;
        shard.shard = h.shard;
        switch (rng() % 3) {
          case 0: store.withdraw(owner, &name, 1, &status); break;
          case 1: store.report_corrupt(owner, h.extent_key, h.write_id, h.shard); break;
          default: store.suspect(owner, &shard, 1, &status);
        }
        store.take_damages();
        if (rng() % 100 == 0) store.scrub({}, 1 << 16);
        if (rng() % 50 == 0) store.flush();
        if (rng() % 200 == 0) store.check_integrity(false);
      }
    });
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (std::thread& t : threads) t.join();
    require_sound(store);
    printf("round %d: %u records, %llu open reads compared, start %s\n", round, newest.load() % 1000000,
           static_cast<unsigned long long>(reads.load()), name_of(store.start_mode()));
    if (!reads) fail("nothing was read", 0);
    store.close(round == 0);
  }
  StoreImpl store(config);
  require_sound(store);
  store.close(true);
  return 0;
}

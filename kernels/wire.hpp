// The framed TCP protocol: hot verbs only (everything else is gRPC). docs/PROTOCOL.md is the text to this.
//
// Every message is a 32-byte FrameHeader and a body; all integers little-endian; structs are packed by construction.
// A connection has one role, fixed by its HELLO: SMALL (hello, discover, promise, withdraw, why, admit, suspect; many requests in flight,
// replies in any order, matched by request id) or BULK (read, write, and reads by RDMA; served strictly in order of arrival). A window directory has one
// role, DIRECTORY, served as SMALL is; its bodies stand in directory_wire.hpp.
//
// Invariants: a length is checked against its limit before anything is allocated; the body check of small messages covers the body;
// bulk bodies carry their own sums (record.hpp). Never changes: the header's first 8 bytes, HELLO's fixed part.
#pragma once
#include "common.hpp"

namespace kv::wire {

inline constexpr uint32_t MAGIC = 0x3146564b;   // "KVF1"
inline constexpr uint8_t VERSION = 1;
inline constexpr uint32_t SMALL_BODY_MAX = 1u << 20;
inline constexpr uint32_t READ_BODY_MAX = 1u << 20;       // a READ request's body
inline constexpr uint32_t KEYS_MAX = 8192;                // keys of one discover, items of one promise / withdraw
inline constexpr uint32_t READ_EXTENTS_MAX = 4096, READ_ITEMS_MAX = 65536;

enum class Verb : uint8_t { HELLO = 1, DISCOVER = 2, PROMISE = 3, WITHDRAW = 4, WHY = 5, ADMIT = 6, SUSPECT = 7, READ = 16, WRITE = 17, VERBS_OPEN = 18, VERBS_READ = 19,
                           REGISTER = 32, LOCATE = 33, TOUCH = 34, FORGET = 35, REPORT = 36, STATUS = 37 };   // of a window directory
enum class Kind : uint8_t { REQUEST = 0, REPLY = 1, ITEM = 2 };   // ITEM: one of several answers to a READ
enum class Role : uint8_t { SMALL = 0, BULK = 1, DIRECTORY = 2 };

struct FrameHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t verb, kind, flags;   // flags: zero
  uint64_t request_id;
  uint32_t status;             // Status; zero in requests
  uint32_t body_bytes;
  uint32_t body_check;         // low 32 bits of xxh3-64(body) on SMALL connections and for READ and VERBS requests; else zero
  uint32_t aux;                // ITEM: ordinal of the item in its READ; else zero
};
static_assert(sizeof(FrameHeader) == 32);

// HELLO, both ways, first message on every connection. The server answers in kind or with a bare status and closes.
struct Hello {
  uint8_t version_min, version_max;
  uint8_t role;                // Role
  uint8_t zero;
  uint32_t capability_bytes;   // follow after this struct (zero until there are tenants)
  uint8_t cluster[16];         // first 16 bytes of BLAKE2b-256 of the cluster's id
  uint64_t epoch;              // newest map epoch the sender knows
  uint64_t boot_id;            // random per daemon start; zero from clients
  uint32_t bucket_seconds;     // length of a time bucket; zero from clients
  uint32_t bucket;             // the daemon's bucket now; zero from clients
};
static_assert(sizeof(Hello) == 48);

// DISCOVER request body: DiscoverRequest | count x 32-byte block keys.
struct DiscoverRequest { uint8_t owner[OWNER_BYTES]; uint64_t epoch; uint32_t count, flags; };
static_assert(sizeof(DiscoverRequest) == 32);
// Reply body: DiscoverReply | writings x { Writing | u32 earlier[] | zero padding to 8 | u64 tags[] }, ordered by key ordinal.
struct DiscoverReply { uint32_t writings, busy; };   // busy: 1 if some keys were not looked at (limits): a "no" means nothing then
struct Writing {
  uint64_t write_id;
  uint64_t shard_mask;         // shards of this writing held here
  uint64_t write_epoch;
  uint32_t key_ordinal, start_block;
  uint16_t block_count, earlier_count;
  uint8_t fidelity, retention_class;
  uint16_t depth;
  uint32_t kv_group, pg;
  uint32_t block_bytes;
  uint8_t k, m, cipher, plane_count;
  uint64_t layout_tag;
};
static_assert(sizeof(DiscoverReply) == 8);
static_assert(sizeof(Writing) == 64);

// PROMISE request body: PromiseRequest | count x WritingName. Reply body: count x PromiseAnswer, same order.
inline constexpr uint32_t PROMISE_PIN = 1, PROMISE_TOUCH = 2;
struct PromiseRequest { uint8_t owner[OWNER_BYTES]; uint64_t epoch; uint32_t count; uint32_t bucket; uint8_t flags, retention_class; uint16_t pin_seconds; uint32_t zero; };
struct WritingName { uint8_t extent_key[KEY_BYTES]; uint64_t write_id; };
struct PromiseAnswer { uint32_t status, last_bucket; uint64_t shard_mask; };   // last_bucket: of its last use, before this touch; 0: not known
// OK: held, pinned and touched as asked; NOT_FOUND; BUSY: held, not pinned
static_assert(sizeof(PromiseRequest) == 40);
static_assert(sizeof(WritingName) == 40);
static_assert(sizeof(PromiseAnswer) == 16);

// WITHDRAW request body: WithdrawRequest | count x WritingName. Reply body: count x u32 status. Leaves a tombstone of 60 s per writing.
struct WithdrawRequest { uint8_t owner[OWNER_BYTES]; uint32_t count, zero; };
static_assert(sizeof(WithdrawRequest) == 24);

// WHY request body: WhyRequest | count x 32-byte keys. Reply body: WhyReply | ghosts x WhyGhost, newest first for each key.
inline constexpr uint32_t WHY_KEYS_MAX = 512, GHOST_TAGS = 64;
struct WhyRequest { uint8_t owner[OWNER_BYTES]; uint32_t count, zero; };
struct WhyReply { uint32_t ghosts, zero; };
struct WhyGhost {              // a writing that began with this key and is gone
  uint32_t key_ordinal, last_bucket;
  uint16_t block_count;
  uint8_t reason, retention_class;   // GhostReason of ghosts.hpp
  uint32_t zero;
  uint8_t tags[GHOST_TAGS];    // lowest byte of each block's tag
};
static_assert(sizeof(WhyRequest) == 24);
static_assert(sizeof(WhyReply) == 8);
static_assert(sizeof(WhyGhost) == 80);

// ADMIT request body: AdmitRequest | count x 32-byte extent keys. Reply body: count x u32 Vote. Each key counts as asked for from now on.
struct AdmitRequest { uint8_t owner[OWNER_BYTES]; uint32_t count, bucket; };
static_assert(sizeof(AdmitRequest) == 24);

// SUSPECT request body: SuspectRequest | count x SuspectShard. Reply body: count x u32 status: OK (will be looked at), NOT_FOUND, BUSY.
inline constexpr uint32_t SUSPECTS_MAX = 64;
struct SuspectRequest { uint8_t owner[OWNER_BYTES]; uint32_t count, zero; };
struct SuspectShard { uint8_t extent_key[KEY_BYTES]; uint64_t write_id; uint8_t shard, zero[7]; };   // whose bytes failed a reader's checks
static_assert(sizeof(SuspectRequest) == 24);
static_assert(sizeof(SuspectShard) == 48);

// READ request body (BULK): ReadRequest | extents x ReadExtent | items x ReadItem.
// Answer: one ITEM per item, in the order asked. Body of an OK item, c blocks: u64 sums[c] | Digest digests[c] | c pieces of shard_bytes(plane).
// Any other status: no body; the connection goes on with the next item.
struct ReadRequest { uint8_t owner[OWNER_BYTES]; uint64_t epoch; uint32_t extents, items; };
struct ReadExtent { uint8_t extent_key[KEY_BYTES]; uint64_t write_id; uint8_t shard, zero; uint16_t first_block, block_count, zero2; };
struct ReadItem { uint16_t extent; uint8_t plane, zero; };
static_assert(sizeof(ReadRequest) == 32);
static_assert(sizeof(ReadExtent) == 48);
static_assert(sizeof(ReadItem) == 4);

// VERBS_OPEN (BULK), both ways: one end of a reliable connection, and the client's landing zone (zero in replies).
inline constexpr uint32_t VERBS_CREDITS_MAX = 65536;
inline constexpr uint64_t VERBS_ZONE_BYTES_MAX = 1u << 30;
struct VerbsOpen {
  uint8_t gid[16];
  uint32_t qpn, psn;           // 24 bits each
  uint8_t mtu, zero;           // mtu: enum ibv_mtu, 1 to 5
  uint16_t lid;                // InfiniBand only
  uint32_t credits;            // receive requests posted
  uint64_t zone_addr, zone_bytes;
  uint32_t rkey, zero2;
};
static_assert(sizeof(VerbsOpen) == 56);

// VERBS_READ request body: VerbsRead | extents x ReadExtent | items x VerbsItem. Each item is answered by RDMA: its body as in an ITEM frame
// to its offset in the zone, then verbs_immediate(). Status other than OK: a write of no bytes.
struct VerbsRead { ReadRequest read; uint32_t credits, round; };   // credits: posted since last told; round: 0 to 255
struct VerbsItem { uint16_t extent; uint8_t plane, zero; uint32_t bytes, offset; };   // bytes: of the body, as expected
static_assert(sizeof(VerbsRead) == 40);
static_assert(sizeof(VerbsItem) == 12);
static_assert(sizeof(VerbsRead) + READ_EXTENTS_MAX * sizeof(ReadExtent) + READ_ITEMS_MAX * sizeof(VerbsItem) <= READ_BODY_MAX);
inline constexpr uint32_t verbs_immediate(uint32_t status, uint32_t round, uint32_t ordinal) {   // in host order: htonl() it
  return status << 24 | (round & 0xff) << 16 | (ordinal & 0xffff);
}

// WRITE (BULK): body = the record (record.hpp) without disk padding. One bare REPLY with a status, after data and index are written.

// Numbers that a bare REPLY may carry in aux: STALE_MAP: the daemon's epoch (low 32 bits). BUSY / NO_SPACE: retry after this many ms.

inline uint32_t body_check(const void* body, size_t n) { return uint32_t(XXH3_64bits(body, n)); }

}  // namespace kv::wire

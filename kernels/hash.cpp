// Block keys and checksums for Python. kvstore/keys.py says what a key is made of, kvstore/tagged.py how fields are joined;
// kvstore/kernels/hash_reference.py is the plain reference.
//
//   message = field(0, domain) field(1, namespace digest) field(2, previous key | nothing) field(3, tokens u32 LE)
//   field(tag, bytes) = tag u8 | length u32 LE | bytes
//
// The part that all keys of one call share is absorbed once; each key then starts from a copy of that state.
#include <sodium.h>

#include <stdexcept>
#include <string_view>

#include "bind.hpp"
#include "common.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {
namespace {

constexpr std::string_view BLOCK_DOMAIN = "kvstore.block.v1", EXTERNAL_DOMAIN = "kvstore.ext.v1";
constexpr size_t SECRET_BYTES_MAX = crypto_generichash_blake2b_KEYBYTES_MAX;

class KeyHasher {
 public:
  KeyHasher(nb::bytes secret, nb::bytes namespace_digest, std::string_view domain) {
    if (secret.size() > SECRET_BYTES_MAX) throw std::invalid_argument("a secret has at most 64 bytes");
    if (namespace_digest.size() != KEY_BYTES) throw std::invalid_argument("a namespace digest has 32 bytes");
    crypto_generichash_blake2b_init(&state_, static_cast<const uint8_t*>(secret.data()), secret.size(), KEY_BYTES);
    field(state_, 0, domain.data(), domain.size());
    field(state_, 1, namespace_digest.data(), namespace_digest.size());
  }
  void block_key(const uint8_t* previous, size_t previous_bytes, const void* tokens, size_t token_bytes, uint8_t* out) const {
    crypto_generichash_blake2b_state s = state_;
    field(s, 2, previous, previous_bytes);
    field(s, 3, tokens, token_bytes);
    crypto_generichash_blake2b_final(&s, out, KEY_BYTES);
  }
  void external_key(const uint8_t* hash, size_t hash_bytes, uint8_t* out) const {
    crypto_generichash_blake2b_state s = state_;
    field(s, 2, hash, hash_bytes);
    crypto_generichash_blake2b_final(&s, out, KEY_BYTES);
  }

 private:
  static void field(crypto_generichash_blake2b_state& s, uint8_t tag, const void* bytes, size_t count) {
    uint8_t head[5] = {tag};
    const uint32_t length = uint32_t(count);
    std::memcpy(head + 1, &length, 4);
    crypto_generichash_blake2b_update(&s, head, sizeof head);
    crypto_generichash_blake2b_update(&s, static_cast<const uint8_t*>(bytes), count);
  }
  crypto_generichash_blake2b_state state_;
};

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

using Tokens = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U64s = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void block_keys(nb::bytes secret, nb::bytes namespace_digest, nb::bytes previous, Tokens tokens, uint32_t block_tokens, Bytes2Out out) {
  const size_t blocks = out.shape(0), block_bytes = size_t(block_tokens) * 4;
  require(previous.size() == 0 || previous.size() == KEY_BYTES, "the previous key has 32 bytes, or 0 before the first block");
  require(out.shape(1) == KEY_BYTES, "keys have 32 bytes");
  require(block_tokens > 0 && blocks <= tokens.shape(0) / block_tokens && tokens.shape(0) == blocks * block_tokens,
          "tokens must fill the blocks exactly");
  const KeyHasher hasher(secret, namespace_digest, BLOCK_DOMAIN);
  const uint8_t* before = static_cast<const uint8_t*>(previous.data());
  size_t before_bytes = previous.size();
  const uint8_t* at = reinterpret_cast<const uint8_t*>(tokens.data());
  uint8_t* key = out.data();
  nb::gil_scoped_release release;
  for (size_t b = 0; b < blocks; b++, at += block_bytes, key += KEY_BYTES) {
    hasher.block_key(before, before_bytes, at, block_bytes, key);
    before = key;
    before_bytes = KEY_BYTES;
  }
}

void external_keys(nb::bytes secret, nb::bytes namespace_digest, Bytes1 hashes, U64s ends, Bytes2Out out) {
  require(out.shape(0) == ends.shape(0) && out.shape(1) == KEY_BYTES, "one 32-byte key for each hash");
  const KeyHasher hasher(secret, namespace_digest, EXTERNAL_DOMAIN);
  uint64_t start = 0;
  for (size_t i = 0; i < ends.shape(0); start = ends.data()[i++])
    require(ends.data()[i] >= start && ends.data()[i] <= hashes.shape(0), "ends must rise and stay inside the hashes");
  nb::gil_scoped_release release;
  start = 0;
  for (size_t i = 0; i < ends.shape(0); start = ends.data()[i++])
    hasher.external_key(hashes.data() + start, ends.data()[i] - start, out.data() + i * KEY_BYTES);
}

// SipHash-2-4: who has not the salt can neither tell a key from its fingerprint nor forge one.
void fingerprints(nb::bytes salt, Bytes2 keys, nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  require(salt.size() == crypto_shorthash_siphash24_KEYBYTES, "a salt has 16 bytes");
  require(keys.shape(1) == KEY_BYTES && out.shape(0) == keys.shape(0), "keys (n, 32), out (n,)");
  static_assert(crypto_shorthash_siphash24_BYTES == sizeof(uint64_t));
  const auto* secret = static_cast<const uint8_t*>(salt.data());
  nb::gil_scoped_release release;
  for (size_t i = 0; i < keys.shape(0); i++)
    crypto_shorthash_siphash24(reinterpret_cast<uint8_t*>(out.data() + i), keys.data() + i * KEY_BYTES, KEY_BYTES, secret);
}

uint64_t seed_of(nb::bytes owner, nb::bytes extent_key, uint64_t write_id, uint32_t shard, uint32_t plane, uint32_t block) {
  require(owner.size() == OWNER_BYTES && extent_key.size() == KEY_BYTES, "an owner has 16 bytes, an extent key 32");
  ShardIdentity id{};
  std::memcpy(id.owner, owner.data(), OWNER_BYTES);
  std::memcpy(id.extent_key, extent_key.data(), KEY_BYTES);
  id.write_id = write_id;
  id.shard = shard, id.plane = plane, id.block = block;
  return shard_seed(id);
}

nb::tuple digest_of(nb::bytes block_key, uint64_t write_id, U64s data_sums) {
  require(block_key.size() == KEY_BYTES && data_sums.shape(0) <= K_MAX, "a key has 32 bytes, a plane at most 32 data shards");
  const Digest d = plane_digest(static_cast<const uint8_t*>(block_key.data()), write_id, data_sums.data(), uint32_t(data_sums.shape(0)));
  return nb::make_tuple(d.low, d.high);
}

}  // namespace
}  // namespace kv

void bind_hash(nb::module_& m) {
  if (sodium_init() < 0) throw std::runtime_error("libsodium did not start");
  m.def("block_keys", &kv::block_keys, "secret"_a, "namespace_digest"_a, "previous"_a, "tokens"_a.noconvert(), "block_tokens"_a, "out"_a.noconvert());
  m.def("external_keys", &kv::external_keys, "secret"_a, "namespace_digest"_a, "hashes"_a.noconvert(), "ends"_a.noconvert(), "out"_a.noconvert());
  m.def("fingerprints", &kv::fingerprints, "salt"_a, "keys"_a.noconvert(), "out"_a.noconvert());
  m.def("shard_seed", &kv::seed_of, "owner"_a, "extent_key"_a, "write_id"_a, "shard"_a, "plane"_a, "block"_a);
  m.def(
      "shard_sum",
      [](kv::Bytes1 bytes, uint64_t seed) {
        nb::gil_scoped_release release;
        return kv::shard_sum(bytes.data(), bytes.shape(0), seed);
      },
      "bytes"_a, "seed"_a);
  m.def("plane_digest", &kv::digest_of, "block_key"_a, "write_id"_a, "data_sums"_a.noconvert());
  m.def(
      "block_tag",
      [](nb::bytes block_key) {
        kv::require(block_key.size() == kv::KEY_BYTES, "a key has 32 bytes");
        return kv::block_tag(static_cast<const uint8_t*>(block_key.data()));
      },
      "block_key"_a);
}

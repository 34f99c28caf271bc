// See codec.hpp. ISA-L does the arithmetic; this file makes its matrices and walks the strided buffers.
#include "codec.hpp"

#include <isa-l/erasure_code.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace kv {
namespace {

constexpr size_t TABLE_BYTES = 32;    // ISA-L: 32 bytes of tables per coefficient
constexpr size_t CACHE_SETS_MAX = 4096;   // x at most 32 * 32 * 4 B = 16 MiB a codec; 10+2 has 66 survivor sets, 32+4 has 58,905

std::vector<uint8_t> generator_matrix(uint32_t k, uint32_t m) {
  const uint32_t n = k + m;
  std::vector<uint8_t> vandermonde(size_t(n) * k, 0);
  vandermonde[0] = 1;
  uint8_t x = 1;   // a^(r-1)
  for (uint32_t r = 1; r < n; r++, x = gf_mul(x, 2)) {
    uint8_t power = 1;
    for (uint32_t c = 0; c < k; c++, power = gf_mul(power, x)) vandermonde[size_t(r) * k + c] = power;
  }
  std::vector<uint8_t> top(vandermonde.begin(), vandermonde.begin() + ptrdiff_t(k) * k), inverse(size_t(k) * k);
  if (gf_invert_matrix(top.data(), inverse.data(), int(k)) != 0) throw std::logic_error("a Vandermonde matrix has an inverse");
  std::vector<uint8_t> g(size_t(n) * k, 0);
  for (uint32_t r = 0; r < n; r++)
    for (uint32_t c = 0; c < k; c++) {
      uint8_t sum = 0;
      for (uint32_t i = 0; i < k; i++) sum ^= gf_mul(vandermonde[size_t(r) * k + i], inverse[size_t(i) * k + c]);
      g[size_t(r) * k + c] = sum;
    }
  return g;
}

CodecTables make_tables(uint32_t k, uint32_t rows, std::vector<uint8_t> coefficients) {
  CodecTables t{k, rows, std::vector<uint8_t>(TABLE_BYTES * k * rows)};
  if (rows) ec_init_tables(int(k), int(rows), coefficients.data(), t.bytes.data());
  return t;
}

// Walks one plane of one block in at most two steps, so that the data shard cut by the plane's end is read and written where it lies:
// up to the cut all shards up to it are bytes of the block, behind the cut it is padding. Shards past it are padding from the start.
class PlaneSteps {
 public:
  PlaneSteps(uint32_t k, uint32_t plane_bytes, uint32_t shard_bytes)
      : shard_bytes_(shard_bytes), whole_(plane_bytes / shard_bytes), cut_(plane_bytes % shard_bytes) {
    if (whole_ < k) padding_.resize(shard_bytes);
  }
  // step(from, to) for the one or two ranges of bytes inside a shard.
  template <typename Step>
  void each(Step&& step) const {
    if (cut_ && !padding_.empty()) step(0u, cut_), step(cut_, shard_bytes_);
    else step(0u, shard_bytes_);
  }
  bool is_real(uint32_t shard, uint32_t from) const { return shard < whole_ || (shard == whole_ && from < cut_); }
  const uint8_t* read(const uint8_t* plane, uint32_t shard, uint32_t from) const {
    return is_real(shard, from) ? plane + size_t(shard) * shard_bytes_ + from : padding_.data();
  }

 private:
  uint32_t shard_bytes_, whole_, cut_;
  std::vector<uint8_t> padding_;   // zeros
};

}  // namespace

void CodecTables::run(size_t len, const uint8_t* const* in, uint8_t* const* out) const {
  if (rows == 0 || len == 0) return;
  // ISA-L takes an int and does not write through its inputs; a step of 1 GiB keeps any length inside an int.
  constexpr size_t STEP = size_t(1) << 30;
  const uint8_t* src[K_MAX];
  uint8_t* dst[SHARDS_MAX];
  for (size_t at = 0; at < len; at += STEP) {
    for (uint32_t i = 0; i < k; i++) src[i] = in[i] + at;
    for (uint32_t j = 0; j < rows; j++) dst[j] = out[j] + at;
    ec_encode_data(int(std::min(STEP, len - at)), int(k), int(rows), const_cast<uint8_t*>(bytes.data()), const_cast<uint8_t**>(src), dst);
  }
}

Codec::Codec(uint32_t k, uint32_t m) : k_(k), m_(m) {
  if (k < 1 || k > K_MAX || m > M_MAX) throw std::invalid_argument("k must be 1 to 32 and m 0 to 4");
  matrix_ = generator_matrix(k, m);
  encode_ = make_tables(k, m, {matrix_.begin() + ptrdiff_t(k) * k, matrix_.end()});
}

void Codec::encode(size_t len, const uint8_t* const* data, uint8_t* const* parity) const { encode_.run(len, data, parity); }

bool Codec::sets_of(const uint32_t* have_ids, const uint32_t* want_ids, uint32_t want, Sets& sets) const {
  sets = {0, 0};
  auto add = [this](uint64_t& set, const uint32_t* ids, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
      if (ids[i] >= k_ + m_ || (set >> ids[i] & 1)) return false;
      set |= uint64_t(1) << ids[i];
    }
    return true;
  };
  return add(sets.have, have_ids, k_) && add(sets.want, want_ids, want) && (sets.have & sets.want) == 0;
}

std::shared_ptr<const CodecTables> Codec::tables_of(Sets sets) const {
  {
    std::shared_lock lock(mutex_);
    if (auto it = cache_.find(sets); it != cache_.end()) return it->second;
  }
  std::vector<uint8_t> survivors, inverse(size_t(k_) * k_), coefficients;
  for (uint32_t s = 0; s < k_ + m_; s++)
    if (sets.have >> s & 1) survivors.insert(survivors.end(), &matrix_[size_t(s) * k_], &matrix_[size_t(s) * k_] + k_);
  if (gf_invert_matrix(survivors.data(), inverse.data(), int(k_)) != 0) throw std::logic_error("any k rows of the matrix have an inverse");
  uint32_t rows = 0;
  for (uint32_t s = 0; s < k_ + m_; s++) {
    if (!(sets.want >> s & 1)) continue;
    rows++;
    for (uint32_t c = 0; c < k_; c++) {
      uint8_t sum = 0;
      for (uint32_t i = 0; i < k_; i++) sum ^= gf_mul(matrix_[size_t(s) * k_ + i], inverse[size_t(i) * k_ + c]);
      coefficients.push_back(sum);
    }
  }
  auto tables = std::make_shared<const CodecTables>(make_tables(k_, rows, std::move(coefficients)));
  std::unique_lock lock(mutex_);
  if (cache_.size() >= CACHE_SETS_MAX) cache_.clear();
  return cache_.emplace(sets, std::move(tables)).first->second;
}

std::shared_ptr<const CodecTables> Codec::tables(const uint32_t* have_ids, const uint32_t* want_ids, uint32_t want) const {
  Sets sets;
  if (want > m_ || !sets_of(have_ids, want_ids, want, sets)) return nullptr;
  return tables_of(sets);
}

bool Codec::decode(size_t len, const uint32_t* have_ids, const uint8_t* const* have, const uint32_t* want_ids, uint32_t want,
                   uint8_t* const* out) const {
  Sets sets;
  if (want > m_ || !sets_of(have_ids, want_ids, want, sets)) return false;
  if (want == 0) return true;
  auto tables = tables_of(sets);
  const uint8_t* by_id[SHARDS_MAX] = {};
  uint8_t* wanted_by_id[SHARDS_MAX] = {};
  for (uint32_t i = 0; i < k_; i++) by_id[have_ids[i]] = have[i];
  for (uint32_t j = 0; j < want; j++) wanted_by_id[want_ids[j]] = out[j];
  const uint8_t** in_end = std::remove(by_id, by_id + k_ + m_, nullptr);
  uint8_t** out_end = std::remove(wanted_by_id, wanted_by_id + k_ + m_, nullptr);
  if (in_end - by_id != k_ || out_end - wanted_by_id != want) return false;   // a null buffer
  tables->run(len, by_id, wanted_by_id);
  return true;
}

void Codec::encode_plane(uint32_t blocks, const uint8_t* plane, size_t block_stride, uint32_t plane_bytes, uint32_t shard_bytes,
                         uint8_t* const* parity) const {
  const PlaneSteps steps(k_, plane_bytes, shard_bytes);
  const uint8_t* in[K_MAX];
  uint8_t* out[M_MAX];
  for (uint32_t b = 0; b < blocks; b++, plane += block_stride)
    steps.each([&](uint32_t from, uint32_t to) {
      for (uint32_t i = 0; i < k_; i++) in[i] = steps.read(plane, i, from);
      for (uint32_t j = 0; j < m_; j++) out[j] = parity[j] + size_t(b) * shard_bytes + from;
      encode_.run(to - from, in, out);
    });
}

bool Codec::rebuild_plane(uint32_t blocks, uint8_t* plane, size_t block_stride, uint32_t plane_bytes, uint32_t shard_bytes,
                          const uint32_t* have_ids, const uint8_t* const* parity) const {
  Sets sets;
  if (!sets_of(have_ids, nullptr, 0, sets)) return false;
  uint32_t have[K_MAX], lost[M_MAX], have_count = 0, lost_count = 0;
  for (uint32_t s = 0; s < k_ + m_; s++) {
    if (sets.have >> s & 1)
      have[have_count++] = s;
    else if (s < k_ && shard_real_bytes(plane_bytes, shard_bytes, s))
      lost[lost_count++] = s, sets.want |= uint64_t(1) << s;
  }
  if (lost_count == 0) return true;
  for (uint32_t i = 0; i < k_; i++)
    if (have[i] >= k_ && !parity[have[i] - k_]) return false;
  const auto tables = tables_of(sets);
  const PlaneSteps steps(k_, plane_bytes, shard_bytes);
  std::vector<uint8_t> padding_out;   // where the padding of a lost shard goes
  if (shard_real_bytes(plane_bytes, shard_bytes, lost[lost_count - 1]) < shard_bytes) padding_out.resize(shard_bytes);
  const uint8_t* in[K_MAX];
  uint8_t* out[M_MAX];
  for (uint32_t b = 0; b < blocks; b++, plane += block_stride)
    steps.each([&](uint32_t from, uint32_t to) {
      for (uint32_t i = 0; i < k_; i++)
        in[i] = have[i] < k_ ? steps.read(plane, have[i], from) : parity[have[i] - k_] + size_t(b) * shard_bytes + from;
      for (uint32_t j = 0; j < lost_count; j++)
        out[j] = steps.is_real(lost[j], from) ? plane + size_t(lost[j]) * shard_bytes + from : padding_out.data();
      tables->run(to - from, in, out);
    });
  return true;
}

}  // namespace kv

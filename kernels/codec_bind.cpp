// kv::Codec for Python. kvstore/erasure checks arguments first; what is refused here again raises CodecError, too.
#include <isa-l/erasure_code.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "codec.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {
namespace {

using Ids = std::vector<uint32_t>;
using Bytes1Out = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes3 = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Bytes3Out = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* cause) {
  if (!holds) raise_fault("CodecError", "E521", "shards", cause);
}

constexpr const char* BAD_NUMBERS = "numbers repeat, are out of range, or are both had and wanted";
constexpr const char* BAD_SHAPE = "shapes do not fit the codec";

void encode(const Codec& codec, Bytes2 data, Bytes2Out parity) {
  require(data.shape(0) == codec.k() && parity.shape(0) == codec.m() && data.shape(1) == parity.shape(1), BAD_SHAPE);
  const uint8_t* in[K_MAX];
  uint8_t* out[M_MAX];
  for (uint32_t i = 0; i < codec.k(); i++) in[i] = data.data() + i * data.shape(1);
  for (uint32_t j = 0; j < codec.m(); j++) out[j] = parity.data() + j * data.shape(1);
  nb::gil_scoped_release release;
  codec.encode(data.shape(1), in, out);
}

void decode(const Codec& codec, const Ids& have_ids, const std::vector<Bytes1>& have, const Ids& want_ids, const std::vector<Bytes1Out>& out) {
  require(have_ids.size() == codec.k() && have.size() == codec.k() && out.size() == want_ids.size(), BAD_SHAPE);
  require(want_ids.size() <= codec.m(), BAD_NUMBERS);
  const size_t bytes = have[0].shape(0);
  const uint8_t* in[K_MAX];
  uint8_t* wanted[M_MAX];
  for (size_t i = 0; i < have.size(); i++) {
    require(have[i].shape(0) == bytes, "lengths differ");
    in[i] = have[i].data();
  }
  for (size_t j = 0; j < out.size(); j++) {
    require(out[j].shape(0) == bytes, "lengths differ");
    wanted[j] = out[j].data();
  }
  bool done;
  {
    nb::gil_scoped_release release;
    done = bytes == 0 || codec.decode(bytes, have_ids.data(), in, want_ids.data(), uint32_t(want_ids.size()), wanted);
  }
  require(done, BAD_NUMBERS);
}

struct PlaneShape {
  size_t offset_bytes;
  uint32_t plane_bytes, shard_bytes;
};

template <typename Array>
PlaneShape checked_plane(const Codec& codec, const Array& blocks, size_t offset_bytes, size_t plane_bytes, size_t shard_bytes) {
  require(rows_are_dense(blocks), "blocks must have contiguous rows that do not overlap");
  require(plane_bytes > 0 && plane_bytes <= BLOCK_BYTES_MAX && offset_bytes <= blocks.shape(1) && plane_bytes <= blocks.shape(1) - offset_bytes,
          "the plane does not lie inside the block");
  require(shard_bytes <= BLOCK_BYTES_MAX && shard_bytes * codec.k() >= plane_bytes, "k shards do not hold the plane");
  return {offset_bytes, uint32_t(plane_bytes), uint32_t(shard_bytes)};
}

void encode_plane(const Codec& codec, Rows blocks, size_t offset_bytes, size_t plane_bytes, Bytes3Out parity) {
  require(parity.shape(0) == codec.m() && parity.shape(1) == blocks.shape(0), BAD_SHAPE);
  const PlaneShape plane = checked_plane(codec, blocks, offset_bytes, plane_bytes, parity.shape(2));
  uint8_t* out[M_MAX];
  for (uint32_t j = 0; j < codec.m(); j++) out[j] = parity.data() + j * parity.shape(1) * parity.shape(2);
  nb::gil_scoped_release release;
  codec.encode_plane(uint32_t(blocks.shape(0)), blocks.data() + plane.offset_bytes, size_t(blocks.stride(0)), plane.plane_bytes,
                     plane.shard_bytes, out);
}

void rebuild_plane(const Codec& codec, RowsOut blocks, size_t offset_bytes, size_t plane_bytes, size_t shard_bytes, const Ids& have_ids,
                   const std::vector<Bytes2>& parity) {
  require(have_ids.size() == codec.k(), BAD_SHAPE);
  const PlaneShape plane = checked_plane(codec, blocks, offset_bytes, plane_bytes, shard_bytes);
  const uint8_t* by_number[M_MAX] = {};
  size_t used = 0;
  for (uint32_t id : have_ids) {
    require(id < codec.k() + codec.m(), BAD_NUMBERS);
    if (id < codec.k()) continue;
    require(used < parity.size() && parity[used].shape(0) == blocks.shape(0) && parity[used].shape(1) == shard_bytes,
            "one (blocks, shard_bytes) array for each parity shard named");
    by_number[id - codec.k()] = parity[used++].data();
  }
  require(used == parity.size(), "one (blocks, shard_bytes) array for each parity shard named");
  bool done;
  {
    nb::gil_scoped_release release;
    done = codec.rebuild_plane(uint32_t(blocks.shape(0)), blocks.data() + plane.offset_bytes, size_t(blocks.stride(0)), plane.plane_bytes,
                               plane.shard_bytes, have_ids.data(), by_number);
  }
  require(done || blocks.shape(0) == 0, BAD_NUMBERS);
}

// The limit that benchmarks measure against: ISA-L and nothing else over padded, contiguous shards.
void bare_isal(const Codec& codec, const Ids& have_ids, const Ids& want_ids, Bytes3 have, Bytes3Out out) {
  const size_t blocks = have.shape(0), rows = want_ids.size(), bytes = have.shape(2);
  require(have_ids.size() == codec.k() && have.shape(1) == codec.k() && out.shape(0) == blocks && out.shape(1) == rows &&
              out.shape(2) == bytes && bytes <= BLOCK_BYTES_MAX,
          BAD_SHAPE);
  auto tables = codec.tables(have_ids.data(), want_ids.data(), uint32_t(rows));
  require(tables != nullptr, BAD_NUMBERS);
  nb::gil_scoped_release release;
  uint8_t* in[K_MAX];
  uint8_t* wanted[M_MAX];
  for (size_t b = 0; b < blocks; b++) {
    for (size_t i = 0; i < codec.k(); i++) in[i] = const_cast<uint8_t*>(have.data()) + (b * codec.k() + i) * bytes;
    for (size_t j = 0; j < rows; j++) wanted[j] = out.data() + (b * rows + j) * bytes;
    ec_encode_data(int(bytes), int(codec.k()), int(rows), const_cast<uint8_t*>(tables->bytes.data()), in, wanted);
  }
}

}  // namespace
}  // namespace kv

void bind_codec(nb::module_& m) {
  using kv::Codec;
  nb::class_<Codec>(m, "Codec")
      .def("__init__",
           [](Codec* self, uint32_t k, uint32_t parity) {
             kv::require(k >= 1 && k <= kv::K_MAX && parity <= kv::M_MAX, "k must be 1 to 32 and m 0 to 4");
             new (self) Codec(k, parity);
           },
           "k"_a, "m"_a)
      .def_prop_ro("k", &Codec::k)
      .def_prop_ro("m", &Codec::m)
      .def("matrix", [](const Codec& c) { return nb::bytes(c.matrix().data(), c.matrix().size()); })
      .def("encode", &kv::encode, "data"_a.noconvert(), "parity"_a.noconvert())
      .def("decode", &kv::decode, "have_ids"_a, "have"_a.noconvert(), "want_ids"_a, "out"_a.noconvert())
      .def("encode_plane", &kv::encode_plane, "blocks"_a.noconvert(), "offset_bytes"_a, "plane_bytes"_a, "parity"_a.noconvert())
      .def("rebuild_plane", &kv::rebuild_plane, "blocks"_a.noconvert(), "offset_bytes"_a, "plane_bytes"_a, "shard_bytes"_a, "have_ids"_a,
           "parity"_a.noconvert())
      .def("bare_isal", &kv::bare_isal, "have_ids"_a, "want_ids"_a, "have"_a.noconvert(), "out"_a.noconvert());
}

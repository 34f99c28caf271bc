// Helpers for the bind_* functions of the kernels that take or give numpy arrays: checked views, and faults as kvstore.errors.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>
#include <vector>

namespace kv {

namespace nb = nanobind;

using Bytes1 = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2Out = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Rows of bytes with any distance between rows, as blocks lie in a larger buffer; rows_are_dense() before use.
using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using RowsOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::device::cpu>;

template <typename Array>
bool rows_are_dense(const Array& rows) {
  return (rows.shape(1) <= 1 || rows.stride(1) == 1) && (rows.shape(0) <= 1 || rows.stride(0) >= int64_t(rows.shape(1)));
}

// Raises kvstore.errors.<error>(code, what, cause, fix). Call with the GIL held.
[[noreturn]] inline void raise_fault(const char* error, const char* code, const std::string& what, const std::string& cause,
                                     const std::string& fix = "") {
  nb::object type = nb::module_::import_("kvstore.errors").attr(error);
  PyErr_SetObject(type.ptr(), nb::object(type(code, what.c_str(), cause.c_str(), fix.c_str())).ptr());
  throw nb::python_error();
}

// A numpy array that owns these values.
template <typename T>
nb::object array_of(std::vector<T>&& from) {
  auto* kept = new std::vector<T>(std::move(from));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

}  // namespace kv

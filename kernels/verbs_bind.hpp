// Faces of what runs on verbs: without the GIL, and its faults as those of kvstore.errors.
#pragma once
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "verbs.hpp"

namespace kv {

namespace nb = nanobind;
using nb::literals::operator""_a;

[[noreturn]] inline void raise(const verbs::Fault& fault) {
  const char* error = std::string_view(fault.code) == "E148" ? "Unreachable" : "ConfigError";
  nb::object type = nb::module_::import_("kvstore.errors").attr(error);
  PyErr_SetObject(type.ptr(), nb::object(type(fault.code, fault.place.c_str(), fault.cause.c_str(), fault.fix.c_str())).ptr());
  throw nb::python_error();
}

// Runs without the GIL; faults of verbs become those of kvstore.errors.
template <class F>
auto freely(F work) {
  try {
    nb::gil_scoped_release release;
    return work();
  } catch (const verbs::Fault& fault) {
    raise(fault);
  }
}

}  // namespace kv

// kvstore.kernels._native: one function per source file binds what that file exports.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

// Weak: a source file may be left out of a build (a sanitizer build of one part), and its names are then simply absent.
#define KV_PARTS(X) X(hash) X(codec) X(store) X(server) X(directory) X(client) X(asking) X(generate) X(pages) X(loopback) X(direct) X(plan_curve) \
  X(plan_policy)
#define KV_DECLARE(part) __attribute__((weak)) void bind_##part(nb::module_& m);
KV_PARTS(KV_DECLARE)

NB_MODULE(_native, m) {
  m.doc() = "Native core of kvstore; see kvstore/kernels/_native.pyi";
#define KV_BIND(part) \
  if (bind_##part) bind_##part(m);
  KV_PARTS(KV_BIND)
}

// The face of pages.hpp: memory of movers, which a device is to know.
#include "pages.hpp"

#include "bind.hpp"

void bind_pages(nanobind::module_& m) {
  using namespace kv;
  m.def(
      "pinned_pages",
      [](uint64_t bytes) {
        if (bytes > uint64_t(1) << 46) throw std::bad_alloc();   // MemoryError, and no sum below overflows
        auto* pages = new Pages(bytes, Pages::Use::PINNED);
        nb::capsule owner(pages, [](void* p) noexcept { delete static_cast<Pages*>(p); });
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(pages->data(), {bytes}, owner);
      },
      nb::arg("size_bytes"));
}

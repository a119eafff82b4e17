// Memory for packed weights: anonymous, zeroed, aligned for huge pages. Huge pages speed a stream of weights up by 5 to
// 25 %, and a file mapping cannot have them.
#include <sys/mman.h>

#include "pw_cpu.h"

namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

size_t whole_pages(size_t bytes) { return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes; }

}  // namespace

extern "C" {

void* pw_arena_alloc(size_t bytes, int32_t huge_pages) {
  if (bytes == 0 || bytes > SIZE_MAX - 2 * kHugePageBytes) return nullptr;
  const size_t size = whole_pages(bytes);
  void* mapped = mmap(nullptr, size + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(mapped);
  const size_t skipped = whole_pages(reinterpret_cast<size_t>(begin)) - reinterpret_cast<size_t>(begin);
  if (skipped > 0) munmap(begin, skipped);
  munmap(begin + skipped + size, kHugePageBytes - skipped);
  madvise(begin + skipped, size, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return begin + skipped;
}

void pw_arena_free(void* memory, size_t bytes) {
  if (memory != nullptr) munmap(memory, whole_pages(bytes));
}

}  // extern "C"

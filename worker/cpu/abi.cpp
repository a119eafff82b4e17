// Version, struct sizes and error words: what the loader checks before it trusts the library.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "error.h"
#include "pw_cpu.h"
#include "pw_feed.h"

namespace pw {
namespace {

constexpr int kWordsBytes = 512;
thread_local char last_words[kWordsBytes] = "";

struct NamedSize {
  const char* name;
  size_t bytes;
};

constexpr NamedSize kSizes[] = {
    {"pw_weight", sizeof(pw_weight)},           {"pw_op", sizeof(pw_op)},
    {"pw_buffer", sizeof(pw_buffer)},           {"pw_batch", sizeof(pw_batch)},
    {"pw_sampler", sizeof(pw_sampler)},         {"pw_sampled", sizeof(pw_sampled)},
    {"pw_matmul_call", sizeof(pw_matmul_call)}, {"pw_driver", sizeof(pw_driver)},
    {"pw_part", sizeof(pw_part)},               {"pw_feed_plan", sizeof(pw_feed_plan)},
};

}  // namespace

int32_t fail(int32_t code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_words, kWordsBytes, format, arguments);
  va_end(arguments);
  return code;
}

}  // namespace pw

extern "C" {

int32_t pw_abi_version(void) { return PW_ABI_VERSION; }

int32_t pw_struct_size(const char* name) {
  for (const pw::NamedSize& entry : pw::kSizes)
    if (name && std::strcmp(entry.name, name) == 0) return static_cast<int32_t>(entry.bytes);
  return -1;
}

const char* pw_last_error(void) { return pw::last_words; }

}  // extern "C"

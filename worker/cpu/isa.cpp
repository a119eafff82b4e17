// Chooses the instruction set level at run time and hands out the matrix kernels of that level.
#include "isa.h"

#include <atomic>
#include <cstring>

#include "formats.h"
#include "matmul.h"

namespace pw {

namespace avx2 {
extern const MatmulKernels kMatmulKernels;
}
namespace avx512 {
extern const MatmulKernels kMatmulKernels;
}

namespace {

struct IsaName {
  IsaLevel level;
  const char* name;
};
constexpr IsaName kNames[] = {{IsaLevel::avx512, "avx512_vnni"}, {IsaLevel::avx2, "avx2"}, {IsaLevel::none, "none"}};

bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

IsaLevel best_level() {
  __builtin_cpu_init();
  if (cpu_has_avx512()) return IsaLevel::avx512;
  return cpu_has_avx2() ? IsaLevel::avx2 : IsaLevel::none;
}

std::atomic<IsaLevel>& chosen_level() {
  static std::atomic<IsaLevel> level{best_level()};
  return level;
}

}  // namespace

IsaLevel isa_level() { return chosen_level().load(std::memory_order_relaxed); }

const MatmulKernels& matmul_kernels() {
  return isa_level() == IsaLevel::avx512 ? avx512::kMatmulKernels : avx2::kMatmulKernels;
}

ActForm activation_form(int32_t type) {
  if (type == kTypeBF16) return ActForm::bf16;
  return type == kTypeF32 || type == kTypeF16 ? ActForm::f32 : ActForm::q8;
}

}  // namespace pw

extern "C" {

const char* pw_isa(void) {
  for (const pw::IsaName& entry : pw::kNames) {
    if (entry.level == pw::isa_level()) return entry.name;
  }
  return "none";
}

int32_t pw_set_isa(const char* name) {
  for (const pw::IsaName& entry : pw::kNames) {
    if (name == nullptr || strcmp(name, entry.name) != 0) continue;
    if (entry.level == pw::IsaLevel::none || entry.level > pw::best_level()) return PW_E_UNSUPPORTED;
    pw::chosen_level().store(entry.level, std::memory_order_relaxed);
    return PW_OK;
  }
  return PW_E_ARGUMENT;
}

}  // extern "C"

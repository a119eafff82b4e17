// What the machine can do, measured with the team that will run the model: memory bandwidth and the int8 rate.
#include "measure_kernels.h"

#include <atomic>

#include "clock.h"
#include "isa.h"
#include "pw_cpu.h"
#include "team.h"

namespace pw {

namespace avx2 {
extern const MeasureKernels measure_table;
}
namespace avx512 {
extern const MeasureKernels measure_table;
}

const MeasureKernels& measure_kernels() {
  return isa_level() == IsaLevel::avx512 ? avx512::measure_table : avx2::measure_table;
}

namespace {

constexpr int64_t kPeakRounds = 1 << 20;

struct ReadJob {
  const uint8_t* memory;
  size_t bytes;
  std::atomic<uint64_t> sum{0};
};

// One contiguous stream per thread: several streams in one thread reach two thirds of it.
void read_share(TeamMember& member, void* context) {
  ReadJob& job = *static_cast<ReadJob*>(context);
  const size_t lines = job.bytes / 64, n = static_cast<size_t>(member.n_threads());
  const size_t begin = lines * member.index() / n, end = lines * (member.index() + 1) / n;
  job.sum.fetch_add(measure_kernels().read_sum(job.memory + begin * 64, (end - begin) * 64), std::memory_order_relaxed);
}

struct PeakJob {
  std::atomic<int64_t> multiply_adds{0};
};

void multiply(TeamMember&, void* context) {
  const int64_t done = measure_kernels().int8_rounds(kPeakRounds);
  static_cast<PeakJob*>(context)->multiply_adds.fetch_add(done, std::memory_order_relaxed);
}

bool fits(Team& team, int32_t n_threads) { return n_threads >= 1 && n_threads <= team.size(); }

}  // namespace
}  // namespace pw

extern "C" {

double pw_read_bandwidth(pw_team* team, int32_t n_threads, const void* memory, size_t bytes) {
  pw::Team& members = *reinterpret_cast<pw::Team*>(team);
  if (!pw::fits(members, n_threads)) return 0.0;
  pw::ReadJob job{static_cast<const uint8_t*>(memory), bytes, {}};
  const double before_s = pw::now_s();
  members.run(n_threads, pw::read_share, &job);
  return static_cast<double>(bytes / 64 * 64) / (pw::now_s() - before_s);
}

double pw_int8_peak(pw_team* team, int32_t n_threads) {
  pw::Team& members = *reinterpret_cast<pw::Team*>(team);
  if (!pw::fits(members, n_threads)) return 0.0;
  pw::PeakJob job;
  const double before_s = pw::now_s();
  members.run(n_threads, pw::multiply, &job);
  return static_cast<double>(job.multiply_adds.load()) / (pw::now_s() - before_s);
}

}  // extern "C"

// Forking, parking and the barrier of the thread team; see team.h for the promises.
#include "team.h"

#include <climits>
#include <ctime>
#include <exception>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "error.h"
#include "pw_cpu.h"

namespace pw {
namespace {

constexpr int32_t kSpinsWithCpuEach = 4000;  // about 100 us: pieces of work are cut to 30
constexpr int32_t kSpinsOversubscribed = 100;
constexpr int32_t kSpinsBetweenClocks = 64;
constexpr int32_t kSpinsBetweenLooks = 64;  // at where the others run

inline void pause_cpu() { __builtin_ia32_pause(); }

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pin_this_thread(int32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // a refused CPU leaves the thread where the system puts it
}

// What the process may use, as it was before any team pinned a thread: a free thread must not inherit a pin.
const cpu_set_t& process_cpus() {
  static const cpu_set_t cpus = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(getpid(), sizeof(set), &set);
    return set;
  }();
  return cpus;
}

}  // namespace

// ---- member ----

bool TeamMember::arrive() {
  if (n_threads_ == 1) return true;
  const uint32_t before = team_.arrived_.value.fetch_add(1, std::memory_order_acq_rel);
  return before + 1 == static_cast<uint32_t>(n_threads_);
}

void TeamMember::release() {
  team_.arrived_.value.store(0, std::memory_order_relaxed);
  team_.generation_.publish(++generation_);
}

void TeamMember::wait_for_release() {
  team_.note_cpu(index_);
  team_.generation_.wait_for(++generation_, team_.spins_before_sleep_,
                             [this] { return team_.shares_cpu(index_, n_threads_); });
}

void TeamMember::sync() {
  if (n_threads_ > 1) {
    const bool last = open_ ? leader_ : arrive();
    if (last)
      release();
    else
      wait_for_release();
  }
  open_ = false;
  stopped_ = team_.stop_.load(std::memory_order_relaxed);
}

void TeamMember::begin_stage() {
  queue_set_ ^= 1;
  // everybody has left the stage before the last one: its counter of this thread is free to be used again
  team_.queues_[queue_set_ ^ 1][index_].next.store(0, std::memory_order_relaxed);
}

bool TeamMember::take(int32_t owner, int64_t n_units, int64_t piece, int64_t* begin, int64_t* end) {
  const int64_t share_begin = n_units * owner / n_threads_;
  const int64_t share = n_units * (owner + 1) / n_threads_ - share_begin;
  std::atomic<int64_t>& next = team_.queues_[queue_set_][owner].next;
  if (next.load(std::memory_order_relaxed) >= share) return false;
  const int64_t taken = next.fetch_add(piece, std::memory_order_relaxed);
  if (taken >= share) return false;
  *begin = share_begin + taken;
  *end = share_begin + (taken + piece < share ? taken + piece : share);
  return true;
}

void TeamMember::request_stop() { team_.stop_.store(true, std::memory_order_relaxed); }

// ---- waiting ----

void Team::Line::publish(uint32_t next) {
  value.store(next, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(value);
}

template <class SharesCpu>
void Team::Line::wait_for(uint32_t wanted, int32_t n_spins, SharesCpu&& shares_cpu) {
  for (int32_t spin = 1; spin < n_spins; ++spin) {
    if (value.load(std::memory_order_acquire) == wanted) return;
    pause_cpu();
    if (spin % kSpinsBetweenLooks == 0 && shares_cpu()) sched_yield();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t seen; (seen = value.load(std::memory_order_seq_cst)) != wanted;) futex_wait(value, seen);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Team::note_cpu(int32_t index) {
  unsigned cpu = 0;
  getcpu(&cpu, nullptr);
  queues_[0][index].cpu.store(cpu, std::memory_order_relaxed);
}

bool Team::shares_cpu(int32_t index, int32_t n_threads) const {
  const uint32_t own = queues_[0][index].cpu.load(std::memory_order_relaxed);
  for (int32_t other = 0; other < n_threads; ++other)
    if (other != index && queues_[0][other].cpu.load(std::memory_order_relaxed) == own) return true;
  return false;
}

// ---- team ----

Team::Team(int32_t n_threads, const int32_t* cpus, int32_t spin_us) : n_threads_(n_threads), spin_us_(spin_us) {
  const cpu_set_t& allowed = process_cpus();
  if (cpus) cpus_.assign(cpus, cpus + n_threads);
  spins_before_sleep_ = n_threads <= CPU_COUNT(&allowed) ? kSpinsWithCpuEach : kSpinsOversubscribed;
  for (auto& queues : queues_) queues = std::make_unique<Queue[]>(n_threads);
  mailboxes_ = std::make_unique<Mailbox[]>(n_threads);
  threads_.reserve(n_threads - 1);
  try {
    for (int32_t index = 1; index < n_threads; ++index) threads_.emplace_back([this, index] { work(index); });
  } catch (...) {
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  quit_.store(true, std::memory_order_relaxed);
  for (int32_t index = 1; index <= static_cast<int32_t>(threads_.size()); ++index) post(mailboxes_[index]);
  for (std::thread& thread : threads_) thread.join();
}

void Team::post(Mailbox& mailbox) {
  mailbox.job_number.fetch_add(1, std::memory_order_seq_cst);
  if (mailbox.parked.load(std::memory_order_seq_cst)) futex_wake(mailbox.job_number);
}

void Team::wait_for_job(Mailbox& mailbox, uint32_t seen) {
  const int64_t give_up_ns = now_ns() + int64_t{spin_us_} * 1000;
  for (int32_t spins = 1; mailbox.job_number.load(std::memory_order_acquire) == seen; ++spins) {
    pause_cpu();
    if (spins % kSpinsBetweenClocks) continue;
    if (now_ns() < give_up_ns) {
      if (spins_before_sleep_ == kSpinsOversubscribed) sched_yield();
      continue;
    }
    mailbox.parked.store(1, std::memory_order_seq_cst);
    while (mailbox.job_number.load(std::memory_order_seq_cst) == seen) futex_wait(mailbox.job_number, seen);
    mailbox.parked.store(0, std::memory_order_relaxed);
  }
}

void Team::work(int32_t index) {
  if (cpus_.empty())
    sched_setaffinity(0, sizeof(cpu_set_t), &process_cpus());
  else
    pin_this_thread(cpus_[index]);
  Mailbox& mailbox = mailboxes_[index];
  for (uint32_t seen = 0;; ++seen) {
    wait_for_job(mailbox, seen);
    if (quit_.load(std::memory_order_relaxed)) return;
    const int32_t n_threads = job_threads_;
    TeamMember member(*this, index, n_threads);
    job_(member, context_);
    finish(n_threads);
  }
}

// After the last worker's addition the caller may be gone with the next job: nothing of this one is read any more.
void Team::finish(int32_t n_threads) {
  const uint32_t finished = finished_.value.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (finished == static_cast<uint32_t>(n_threads - 1) && finished_.sleepers.load(std::memory_order_seq_cst) > 0)
    futex_wake(finished_.value);
}

void Team::pin_caller() {
  thread_local int32_t pinned_to = -1;
  const int32_t wanted = cpus_.empty() ? -1 : cpus_[0];
  if (wanted == pinned_to) return;
  if (wanted < 0)
    sched_setaffinity(0, sizeof(cpu_set_t), &process_cpus());
  else
    pin_this_thread(wanted);
  pinned_to = wanted;
}

void Team::run(int32_t n_threads, Job job, void* context) {
  pin_caller();
  job_ = job;
  context_ = context;
  job_threads_ = n_threads;
  stop_.store(false, std::memory_order_relaxed);
  if (n_threads > 1) {
    arrived_.value.store(0, std::memory_order_relaxed);
    generation_.value.store(0, std::memory_order_relaxed);
    finished_.value.store(0, std::memory_order_relaxed);
    for (auto& queues : queues_)
      for (int32_t index = 0; index < n_threads; ++index) queues[index].next.store(0, std::memory_order_relaxed);
    for (int32_t index = 1; index < n_threads; ++index) post(mailboxes_[index]);
  }
  TeamMember member(*this, 0, n_threads);
  job(member, context);
  if (n_threads == 1) return;
  note_cpu(0);
  finished_.wait_for(static_cast<uint32_t>(n_threads - 1), spins_before_sleep_,
                     [&] { return shares_cpu(0, n_threads); });
}

}  // namespace pw

extern "C" {

pw_team* pw_team_create(int32_t n_threads, const int32_t* cpus, int32_t spin_us) {
  if (n_threads < 1 || n_threads > 1024 || spin_us < 0) {
    pw::fail(PW_E_ARGUMENT, "a team of %d threads with a spin of %d us: 1 to 1024 threads, spin of 0 or more",
             n_threads, spin_us);
    return nullptr;
  }
  try {
    return reinterpret_cast<pw_team*>(new pw::Team(n_threads, cpus, spin_us));
  } catch (const std::exception& error) {
    pw::fail(PW_E_MEMORY, "a team of %d threads could not start: %s", n_threads, error.what());
    return nullptr;
  }
}

void pw_team_destroy(pw_team* team) { delete reinterpret_cast<pw::Team*>(team); }

}  // extern "C"

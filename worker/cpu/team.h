// A team of threads for one forward pass: fork once, then meet at barriers inside the step, join once.
//
// Between steps a worker spins for `spin_us` and then parks on a futex of its own. Inside a step a thread that waits
// for the others spins too. Where the system has put two of the team on one CPU, the one that waits makes way at once;
// and who has waited longer than any stage is uneven (a thread has lost its CPU) sleeps, so that the late one may run
// in its place. A team on a busy or too small machine slows down, not collapses.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace pw {

class Team;

// Each thread's view of a running job. All threads of a job make the same calls to `serial` and `parallel`, in the same
// order. Stages see everything earlier stages wrote.
class TeamMember {
 public:
  TeamMember(Team& team, int32_t index, int32_t n_threads) : team_(team), index_(index), n_threads_(n_threads) {}

  int32_t index() const { return index_; }
  int32_t n_threads() const { return n_threads_; }

  // Runs `work()` on the one thread that arrives last. Serial stages in a row cost one barrier together.
  template <class Work>
  void serial(Work&& work) {
    if (!open_) {
      open_ = true;
      leader_ = arrive();
    }
    met_ = false;
    if (leader_) work();
  }

  // Waits for all earlier stages, so that what they wrote may be read before the next one. Free before `parallel`.
  void meet() {
    if (!met_) sync();
    met_ = true;
  }

  // Runs `work(begin, end)` until [0, n_units) is covered. A thread takes pieces of at least `piece` units from its own
  // contiguous share in ascending order, then helps others.
  template <class Work>
  void parallel(int64_t n_units, int64_t piece, Work&& work) {
    meet();
    if (stopped_ || n_units <= 0) return;
    met_ = false;
    if (n_threads_ == 1) {
      work(int64_t{0}, n_units);
      return;
    }
    begin_stage();
    int64_t begin, end;
    for (int32_t step = 0; step < n_threads_; ++step) {
      const int32_t owner = index_ + step < n_threads_ ? index_ + step : index_ + step - n_threads_;
      while (take(owner, n_units, piece, &begin, &end)) work(begin, end);
    }
  }

  // Asks the whole team to leave the job: to be called in a serial stage, seen by all at the next parallel one.
  void request_stop();
  bool stopped() const { return stopped_; }

 private:
  bool arrive();  // true for the last of the team, which must call release
  void release();
  void wait_for_release();
  void sync();
  void begin_stage();
  bool take(int32_t owner, int64_t n_units, int64_t piece, int64_t* begin, int64_t* end);

  Team& team_;
  const int32_t index_;
  const int32_t n_threads_;
  uint32_t generation_ = 0;
  int32_t queue_set_ = 0;
  bool open_ = false;
  bool leader_ = false;
  bool met_ = false;
  bool stopped_ = false;
};

class Team {
 public:
  using Job = void (*)(TeamMember& member, void* context);

  // `cpus` pins thread i to cpus[i]; nullptr leaves all free. Throws std::system_error when a thread can not start.
  Team(int32_t n_threads, const int32_t* cpus, int32_t spin_us);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int32_t size() const { return n_threads_; }

  // Runs the job on the calling thread and the first n_threads - 1 workers; returns when all are done.
  void run(int32_t n_threads, Job job, void* context);

 private:
  friend class TeamMember;

  // A number that threads wait for: spinning first, asleep later.
  struct alignas(64) Line {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void publish(uint32_t next);
    // `shares_cpu()` tells whether the CPU is wanted by one that is waited for
    template <class SharesCpu>
    void wait_for(uint32_t wanted, int32_t n_spins, SharesCpu&& shares_cpu);
  };
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    std::atomic<uint32_t> cpu{0};  // where the thread that owns the queue ran last
  };
  struct alignas(64) Mailbox {
    std::atomic<uint32_t> job_number{0};
    std::atomic<uint32_t> parked{0};
  };

  void work(int32_t index);
  void wait_for_job(Mailbox& mailbox, uint32_t seen);
  void post(Mailbox& mailbox);
  void finish(int32_t n_threads);
  void note_cpu(int32_t index);
  bool shares_cpu(int32_t index, int32_t n_threads) const;
  void pin_caller();
  void dismiss();

  const int32_t n_threads_;
  const int32_t spin_us_;
  std::vector<int32_t> cpus_;
  int32_t spins_before_sleep_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  int32_t job_threads_ = 1;
  std::atomic<bool> stop_{false};
  std::atomic<bool> quit_{false};
  Line arrived_;
  Line generation_;
  Line finished_;
  std::unique_ptr<Queue[]> queues_[2];
  std::unique_ptr<Mailbox[]> mailboxes_;
  std::vector<std::thread> threads_;
};

// A piece size that gives each thread a few pieces of its share, so that a thread that lost its CPU can be helped; no
// more than `at_most`, for stages where even such a piece takes long.
inline int64_t piece_of(int64_t n_units, int32_t n_threads, int64_t at_least = 1, int64_t at_most = INT64_MAX) {
  const int64_t fair = n_units / (int64_t{n_threads} * 6);
  const int64_t piece = fair < at_most ? fair : at_most;
  return piece > at_least ? piece : at_least;
}

}  // namespace pw

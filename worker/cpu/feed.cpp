// Feeding a device from files (pw_feed.h): readers take pieces of the parts in order, read each into a pinned slot and
// queue its copy on the feed's one stream. A reader waits for the device only where all its slots are being copied from.
#include "pw_feed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "pw_cpu.h"

namespace pw {
namespace {

constexpr uint32_t kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr uint32_t kNoTiming = 2;       // CU_EVENT_DISABLE_TIMING
constexpr uint32_t kPortableMemory = 1; // CU_MEMHOSTREGISTER_PORTABLE

// The pinned slots of one reader and the events behind their copies.
class Slots {
 public:
  Slots(const pw_driver& driver, int32_t count, int64_t bytes) : driver_(driver), bytes_(bytes), events_(count) {}

  ~Slots() {
    for (void* event : events_)
      if (event != nullptr) driver_.destroy_event(event);
    if (is_registered_) driver_.unregister_memory(memory_);
    pw_arena_free(memory_, size());
  }

  // 0 or the driver's error, -1 where there is no memory. The reader's own thread touches its pages.
  int32_t prepare() {
    memory_ = static_cast<char*>(pw_arena_alloc(size(), 1));
    if (memory_ == nullptr) return -1;
    std::memset(memory_, 0, size());
    if (int32_t status = driver_.register_memory(memory_, size(), kPortableMemory)) return status;
    is_registered_ = true;
    for (void*& event : events_)
      if (int32_t status = driver_.create_event(&event, kNoTiming)) return status;
    return 0;
  }

  char* slot(size_t index) { return memory_ + static_cast<int64_t>(index) * bytes_; }
  void* event(size_t index) { return events_[index]; }
  size_t count() const { return events_.size(); }

 private:
  size_t size() const { return events_.size() * static_cast<size_t>(bytes_); }

  const pw_driver& driver_;
  const int64_t bytes_;
  std::vector<void*> events_;
  char* memory_ = nullptr;
  bool is_registered_ = false;
};

struct Piece {
  int32_t round;
  int32_t part;
  int64_t begin_bytes;  // from the part's first
  int64_t size_bytes;
};

class Feed {
 public:
  explicit Feed(const pw_feed_plan& plan)
      : plan_(plan),
        driver_(*plan.driver),
        parts_(plan.parts, plan.parts + plan.n_parts),
        queued_bytes_(parts_.size()),
        awaited_bytes_(parts_.size()),
        arrived_events_(plan.n_buffers),
        buffer_events_(plan.n_buffers) {
    for (const pw_part& part : parts_) n_buffered_ += part.buffer >= 0;
  }

  ~Feed() {
    stop(PW_OK, "");
    for (std::thread& reader : readers_) reader.join();
    if (stream_ != nullptr) {
      driver_.synchronize_stream(stream_);
      driver_.destroy_stream(stream_);
    }
    for (const std::vector<void*>* events : {&arrived_events_, &buffer_events_})
      for (void* event : *events)
        if (event != nullptr) driver_.destroy_event(event);
    if (arrived_ != nullptr) driver_.destroy_event(arrived_);
  }

  int32_t start() {
    int32_t status = driver_.set_context(plan_.context);
    if (status == 0) status = driver_.create_stream(&stream_, kNonBlocking);
    if (status == 0) status = driver_.create_event(&arrived_, kNoTiming);
    for (std::vector<void*>* events : {&arrived_events_, &buffer_events_})
      for (void*& event : *events)
        if (status == 0) status = driver_.create_event(&event, kNoTiming);
    if (status != 0) return refused(status, "to begin");
    for (int32_t i = 0; i < plan_.n_readers; i++) readers_.emplace_back([this] { read_all(); });
    return PW_OK;
  }

  int32_t await(int32_t part) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const int64_t wanted = awaited_bytes_[part] + parts_[part].size_bytes;
      changed_.wait(lock, [&] { return queued_bytes_[part] >= wanted || is_stopped_; });
      if (queued_bytes_[part] < wanted) return fail(code_, "%s", words_.c_str());
      if (plan_.repeats) awaited_bytes_[part] = wanted;
    }
    const int32_t buffer = parts_[part].buffer;
    int32_t status = buffer >= 0 ? 0 : driver_.record_event(arrived_, stream_);
    if (status == 0) status = driver_.wait_event(plan_.stream, buffer >= 0 ? arrived_events_[buffer] : arrived_, 0);
    return status == 0 ? PW_OK : refused(status, "to wait for copies");
  }

  int32_t release(int32_t buffer) {
    if (int32_t status = driver_.record_event(buffer_events_[buffer], plan_.stream))
      return refused(status, "to mark a buffer");
    std::lock_guard<std::mutex> lock(mutex_);
    n_released_++;
    changed_.notify_all();
    return PW_OK;
  }

 private:
  static int32_t refused(int32_t status, const char* what) {
    return fail(PW_E_DEVICE, "the CUDA driver refuses %s (error %d)", what, status);
  }

  // The first failure counts; it ends all readers.
  void stop(int32_t code, const std::string& words) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_stopped_) {
      is_stopped_ = true;
      code_ = code;
      words_ = words;
    }
    changed_.notify_all();
  }

  // The next piece, once its raw buffer is free to be written; nothing at the end.
  std::optional<Piece> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (next_part_ < plan_.n_parts && next_bytes_ == parts_[next_part_].size_bytes) {
      next_part_++, next_bytes_ = 0;
      if (next_part_ == plan_.n_parts && plan_.repeats) next_part_ = 0, next_round_++;
    }
    if (is_stopped_ || next_part_ == plan_.n_parts) return std::nullopt;
    const int64_t left = parts_[next_part_].size_bytes - next_bytes_;
    const Piece piece{next_round_, next_part_, next_bytes_, std::min(left, plan_.piece_bytes)};
    next_bytes_ += piece.size_bytes;
    const int64_t wanted = releases_before(piece);
    changed_.wait(lock, [&] { return n_released_ >= wanted || is_stopped_; });
    return is_stopped_ ? std::nullopt : std::optional(piece);
  }

  // How many releases say that a piece's raw buffer is free.
  int64_t releases_before(const Piece& piece) const {
    const pw_part& part = parts_[piece.part];
    return piece.round == 0 ? part.n_released : (piece.round - 1) * n_buffered_ + part.n_released_again;
  }

  void read_all() {
    Slots slots(driver_, plan_.n_slots, plan_.piece_bytes);
    int32_t status = driver_.set_context(plan_.context);
    if (status == 0) status = slots.prepare();
    if (status != 0) return stop(PW_E_DEVICE, "no pinned memory for reading (CUDA error " + std::to_string(status) + ")");
    size_t turn = 0;
    while (const std::optional<Piece> piece = next()) {
      if (!bring(*piece, slots, turn)) break;
      turn = (turn + 1) % slots.count();
      if (!count(*piece)) break;
    }
    driver_.synchronize_stream(stream_);  // copies may still read the slots
  }

  // After a piece's copy was queued. Behind the last one of a part stands its own event: waiting for the end of all that
  // is queued would hold the raw buffers of a few parts at once, and the link would pause.
  bool count(const Piece& piece) {
    const pw_part& part = parts_[piece.part];
    int32_t status = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      int64_t& queued = queued_bytes_[piece.part];
      const bool is_last = (queued + piece.size_bytes) % part.size_bytes == 0;
      if (is_last && part.buffer >= 0) status = driver_.record_event(arrived_events_[part.buffer], stream_);
      if (status == 0) queued += piece.size_bytes;
      if (is_last) changed_.notify_all();
    }
    if (status != 0) stop(PW_E_DEVICE, "marking a copy failed (CUDA error " + std::to_string(status) + ")");
    return status == 0;
  }

  bool bring(const Piece& piece, Slots& slots, size_t turn) {
    const pw_part& part = parts_[piece.part];
    int32_t status = driver_.synchronize_event(slots.event(turn));
    if (status == 0 && !read(part, piece, slots.slot(turn))) return false;
    if (status == 0 && releases_before(piece) > 0) status = driver_.wait_event(stream_, buffer_events_[part.buffer], 0);
    const uint64_t target = part.target + static_cast<uint64_t>(piece.begin_bytes);
    const size_t bytes = static_cast<size_t>(piece.size_bytes);
    if (status == 0) status = driver_.copy_in(target, slots.slot(turn), bytes, stream_);
    if (status == 0) status = driver_.record_event(slots.event(turn), stream_);
    if (status != 0) stop(PW_E_DEVICE, "a copy to the device failed (CUDA error " + std::to_string(status) + ")");
    return status == 0;
  }

  bool read(const pw_part& part, const Piece& piece, char* target) {
    int64_t done = 0;
    while (done < piece.size_bytes) {
      const int64_t left = piece.size_bytes - done, offset = part.offset_bytes + piece.begin_bytes + done;
      const ssize_t count = pread(part.file, target + done, static_cast<size_t>(left), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return stop(PW_E_FILE, std::string("reading the model file failed: ") + strerror(errno)), false;
      if (count == 0) {
        const std::string early = std::to_string(left) + " bytes early: it changed while it was read";
        return stop(PW_E_FILE, "the model file ended " + early), false;
      }
      done += count;
    }
    return true;
  }

  const pw_feed_plan plan_;
  const pw_driver driver_;
  const std::vector<pw_part> parts_;
  void* stream_ = nullptr;
  void* arrived_ = nullptr;  // of parts without buffers

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> queued_bytes_;  // of each part, over all rounds
  std::vector<int64_t> awaited_bytes_;
  std::vector<void*> arrived_events_;  // by raw buffer: all of its part's copies are queued before
  std::vector<void*> buffer_events_;   // its last use is queued before
  int64_t n_buffered_ = 0;  // parts that go through raw buffers
  int32_t next_round_ = 0;
  int32_t next_part_ = 0;
  int64_t next_bytes_ = 0;
  int64_t n_released_ = 0;
  bool is_stopped_ = false;
  int32_t code_ = PW_OK;
  std::string words_;
  std::vector<std::thread> readers_;
};

bool is_sound(const pw_feed_plan& plan) {
  if (plan.n_readers < 1 || plan.n_slots < 1 || plan.n_parts < 0 || plan.piece_bytes < 1) return false;
  for (int32_t i = 0; i < plan.n_parts; i++) {
    const pw_part& part = plan.parts[i];
    if (part.size_bytes < 0 || part.buffer >= plan.n_buffers) return false;
    if (part.n_released > 0 && part.buffer < 0) return false;
    if (plan.repeats && (part.buffer < 0 || part.size_bytes == 0)) return false;
    if (i > 0 && part.buffer >= 0 && part.n_released < plan.parts[i - 1].n_released) return false;
  }
  return true;
}

}  // namespace
}  // namespace pw

struct pw_feed : pw::Feed {
  using pw::Feed::Feed;
};

extern "C" {

pw_feed* pw_feed_start(const pw_feed_plan* plan) {
  if (!pw::is_sound(*plan)) {
    pw::fail(PW_E_ARGUMENT, "a feed's parts must use its buffers, in turn");
    return nullptr;
  }
  try {
    auto feed = std::make_unique<pw_feed>(*plan);
    return feed->start() == PW_OK ? feed.release() : nullptr;
  } catch (const std::exception& error) {  // no memory, or no thread more
    pw::fail(PW_E_MEMORY, "a feed cannot start: %s", error.what());
    return nullptr;
  }
}

int32_t pw_feed_await(pw_feed* feed, int32_t part) { return feed->await(part); }
int32_t pw_feed_release(pw_feed* feed, int32_t buffer) { return feed->release(buffer); }

int32_t pw_feed_end(pw_feed* feed) {
  delete feed;
  return PW_OK;
}

}  // extern "C"

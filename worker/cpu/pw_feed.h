/* The C ABI of feeding a device from files: reader threads fill pinned memory of their own and queue copies of it.
 *
 * Python takes too long here: sixteen threads that pass its lock on at every call reach half of the link's rate. The
 * device is asked through functions of the CUDA driver, given by address, so that nothing of CUDA is needed to build or
 * load this library. They return 0 or the driver's error.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct {
  int32_t (*set_context)(void* context);
  int32_t (*register_memory)(void* memory, size_t bytes, uint32_t flags);
  int32_t (*unregister_memory)(void* memory);
  int32_t (*create_stream)(void** stream, uint32_t flags);
  int32_t (*destroy_stream)(void* stream);
  int32_t (*synchronize_stream)(void* stream);
  int32_t (*create_event)(void** event, uint32_t flags);
  int32_t (*destroy_event)(void* event);
  int32_t (*record_event)(void* event, void* stream);
  int32_t (*synchronize_event)(void* event);
  int32_t (*wait_event)(void* stream, void* event, uint32_t flags);
  int32_t (*copy_in)(uint64_t target, const void* source, size_t bytes, void* stream);
} pw_driver;

/* Bytes of a file for `target` on the device. Where `buffer` is not negative, `target` is that raw buffer, which may be
 * written once `n_released` releases have been counted and what was queued before the buffer's last one has ended. */
typedef struct {
  int64_t offset_bytes;
  int64_t size_bytes;
  uint64_t target;
  int32_t file; /* descriptor */
  int32_t buffer;
  int32_t n_released; /* does not fall from part to part */
  int32_t n_released_again; /* the same in later rounds, counted from the begin of the round before */
} pw_part;

typedef struct {
  const pw_driver* driver;
  void* context;
  void* stream; /* where the caller queues what uses the parts */
  const pw_part* parts;
  int64_t piece_bytes; /* of one read and one copy */
  int32_t n_parts;
  int32_t n_buffers;
  int32_t n_readers;
  int32_t n_slots; /* of each reader, for a piece each: one is copied from while another is filled */
  int32_t repeats; /* after the last part the first one comes again, round after round; all parts have buffers */
  int32_t reserved;
} pw_feed_plan;

typedef struct pw_feed pw_feed;
/* Copies the plan and starts the readers; NULL with words in pw_last_error when the device refuses. */
pw_feed* pw_feed_start(const pw_feed_plan* plan);
/* Blocks until all copies of a part are queued; what is queued on the plan's stream from now on runs behind them. Of a
 * plan that repeats, each part is awaited once a round. */
int32_t pw_feed_await(pw_feed* feed, int32_t part);
/* What is queued on the plan's stream by now is the last use of a raw buffer's content; counts one release. */
int32_t pw_feed_release(pw_feed* feed, int32_t buffer);
/* Stops the readers, waits for the copies under way and frees everything. */
int32_t pw_feed_end(pw_feed* feed);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

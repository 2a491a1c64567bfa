// acl functions for streams and events. Work is done when it is issued, so everything is complete.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>

#include "error.h"
#include "export.h"

using cann::fail;

namespace {

using Clock = std::chrono::steady_clock;

struct Stream {
  std::int32_t id;
};

struct Event {
  Clock::time_point recorded = Clock::now();
};

// The live handles of one kind. Never destroyed: torch_npu gives handles back from static
// destructors.
template <typename T>
class Handles {
 public:
  static Handles& instance() {
    static Handles* const handles = new Handles;
    return *handles;
  }

  void add(T* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_.insert(handle);
  }

  // Deletes a live handle; false for any other pointer.
  bool remove(void* handle) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (live_.erase(handle) == 0) {
        return false;
      }
    }
    delete static_cast<T*>(handle);
    return true;
  }

 private:
  std::mutex mutex_;
  std::set<void*> live_;
};

int create_stream(void** stream) {
  static std::atomic<std::int32_t> next_id{1};
  auto* const created = new Stream{next_id++};
  Handles<Stream>::instance().add(created);
  *stream = created;
  return cann::kAclSuccess;
}

int destroy_stream(const char* function, void* stream) {
  return Handles<Stream>::instance().remove(stream)
             ? cann::kAclSuccess
             : fail(function, cann::kAclInvalidParam, "the stream does not exist");
}

int create_event(void** event) {
  auto* const created = new Event;
  Handles<Event>::instance().add(created);
  *event = created;
  return cann::kAclSuccess;
}

constexpr int kStreamComplete = 0;
constexpr int kEventRecorded = 1;
constexpr int kEventWaitComplete = 0;

}  // namespace

extern "C" {

CANN_API int aclrtCreateStream(void** stream) { return create_stream(stream); }

CANN_API int aclrtCreateStreamWithConfig(void** stream, std::uint32_t /*priority*/,
                                         std::uint32_t /*flag*/) {
  return create_stream(stream);
}

CANN_API int aclrtDestroyStream(void* stream) {
  return destroy_stream("aclrtDestroyStream", stream);
}

CANN_API int aclrtDestroyStreamForce(void* stream) {
  return destroy_stream("aclrtDestroyStreamForce", stream);
}

CANN_API int aclrtStreamGetId(void* stream, std::int32_t* id) {
  *id = stream == nullptr ? 0 : static_cast<Stream*>(stream)->id;
  return cann::kAclSuccess;
}

CANN_API int aclrtStreamQuery(void* /*stream*/, int* status) {
  *status = kStreamComplete;
  return cann::kAclSuccess;
}

CANN_API int aclrtSynchronizeStream(void* /*stream*/) { return cann::kAclSuccess; }

CANN_API int aclrtSynchronizeStreamWithTimeout(void* /*stream*/, std::int32_t /*timeout*/) {
  return cann::kAclSuccess;
}

CANN_API int aclrtSynchronizeDevice() { return cann::kAclSuccess; }

CANN_API int aclrtSynchronizeDeviceWithTimeout(std::int32_t /*timeout*/) {
  return cann::kAclSuccess;
}

CANN_API int aclrtStreamWaitEvent(void* /*stream*/, void* /*event*/) { return cann::kAclSuccess; }

CANN_API int aclrtCreateEventExWithFlag(void** event, std::uint32_t /*flag*/) {
  return create_event(event);
}

CANN_API int aclrtCreateEventWithFlag(void** event, std::uint32_t /*flag*/) {
  return create_event(event);
}

CANN_API int aclrtDestroyEvent(void* event) {
  return Handles<Event>::instance().remove(event)
             ? cann::kAclSuccess
             : fail("aclrtDestroyEvent", cann::kAclInvalidParam, "the event does not exist");
}

CANN_API int aclrtRecordEvent(void* event, void* /*stream*/) {
  static_cast<Event*>(event)->recorded = Clock::now();
  return cann::kAclSuccess;
}

CANN_API int aclrtResetEvent(void* /*event*/, void* /*stream*/) { return cann::kAclSuccess; }
CANN_API int aclrtSynchronizeEvent(void* /*event*/) { return cann::kAclSuccess; }

CANN_API int aclrtQueryEventStatus(void* /*event*/, int* status) {
  *status = kEventRecorded;
  return cann::kAclSuccess;
}

CANN_API int aclrtQueryEventWaitStatus(void* /*event*/, int* status) {
  *status = kEventWaitComplete;
  return cann::kAclSuccess;
}

CANN_API int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  const auto elapsed =
      static_cast<const Event*>(end)->recorded - static_cast<const Event*>(start)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return cann::kAclSuccess;
}

CANN_API int aclrtEventGetTimestamp(void* event, std::uint64_t* microseconds) {
  const auto since_start = static_cast<const Event*>(event)->recorded.time_since_epoch();
  *microseconds = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(since_start).count());
  return cann::kAclSuccess;
}

// Host callbacks run at once: everything before them in the stream is complete.
CANN_API int aclrtLaunchCallback(void (*callback)(void*), void* argument, int /*block_type*/,
                                 void* /*stream*/) {
  callback(argument);
  return cann::kAclSuccess;
}

CANN_API int aclrtLaunchHostFunc(void* /*stream*/, void (*callback)(void*), void* argument) {
  callback(argument);
  return cann::kAclSuccess;
}

}  // extern "C"

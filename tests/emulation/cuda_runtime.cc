// SPDX-License-Identifier: Apache-2.0
// Implements on a CPU the functions of the CUDA runtime that epx and its tests use. Devices have ordinals and nothing else;
// memory is the host's; a capture records the tasks that are enqueued, and its graph runs them one after the other in that
// order, whichever streams of the capture they were for.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/emulation/device_memory.h"
#include "tests/emulation/exported_memory.h"
#include "tests/emulation/streams.h"

namespace {

constexpr int kDevices = 64;
// Streaming multiprocessors; tests set the environment variable while they run.
int multiprocessors() {
  const char* const text = std::getenv("EPX_EMULATED_SMS");
  return text != nullptr ? std::atoi(text) : 3;
}

// 10 * major + minor; tests set the environment variable while they run.
int compute_capability() {
  const char* const text = std::getenv("EPX_EMULATED_COMPUTE_CAPABILITY");
  return text != nullptr ? std::atoi(text) : 90;
}

constexpr int kSharedBytes = 227 << 10; // per block
constexpr size_t kMemoryAlignment = 256;
constexpr size_t kMemoryBytes = size_t{64} << 30;
constexpr size_t kExportedBlock = size_t{2} << 20; // other processes can open allocations of whole blocks

using Task = std::function<void()>;
using Tasks = std::vector<Task>;

// A capture, which a stream begins, and which others join by waiting for an event of it. All streams that are captured must
// have been waited for when it ends.
class GraphCapture {
public:
  // By stream, how many tasks of it come before a place in the graph.
  using Place = std::map<const CUstream_st*, size_t>;

  GraphCapture(const CUstream_st* origin, cudaStreamCaptureMode mode) : origin_(origin), mode_(mode) {}

  cudaStreamCaptureMode mode() const { return mode_; }

  void add(const CUstream_st* stream, Task task) {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    ++places_[stream][stream];
  }
  Place place_of(const CUstream_st* stream) {
    const std::scoped_lock lock(mutex_);
    return places_[stream];
  }
  void wait(CUstream_st* stream, const Place& place) {
    const std::scoped_lock lock(mutex_);
    if (stream != origin_) joined_.insert(stream);
    for (const auto& [other, tasks] : place) {
      size_t& known = places_[stream][other];
      known = std::max(known, tasks);
    }
  }
  // Returns the streams that have joined.
  const std::set<CUstream_st*>& joined() const { return joined_; }
  // Returns whether the origin has waited for all work.
  bool is_joined_up() {
    const std::scoped_lock lock(mutex_);
    Place& all = places_[origin_];
    return std::ranges::all_of(places_, [&](const auto& of_stream) {
      const auto own = of_stream.second.find(of_stream.first);
      return own == of_stream.second.end() || all[of_stream.first] >= own->second;
    });
  }
  Tasks take() { return std::move(tasks_); }

private:
  const CUstream_st* origin_;
  cudaStreamCaptureMode mode_;
  std::mutex mutex_;
  Tasks tasks_;
  std::map<const CUstream_st*, Place> places_; // what each stream has seen
  std::set<CUstream_st*> joined_;
};

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local int num_own_captures = 0;   // those that are not relaxed
std::atomic<int> num_global_captures{0}; // of all threads

// Returns whether CUDA refuses what it calls potentially unsafe, which for the emulation are queries of streams and events.
bool is_unsafe_beside_capture() {
  return capture_mode != cudaStreamCaptureModeRelaxed &&
         (num_own_captures > 0 || (capture_mode == cudaStreamCaptureModeGlobal && num_global_captures > 0));
}
std::atomic<bool> context_is_dead = false;

// cudaFree holds the driver's lock while it waits for the device, and what destroys streams and events takes it.
std::mutex& driver_lock() {
  static std::array<std::mutex, kDevices>& locks = *new std::array<std::mutex, kDevices>;
  return locks[static_cast<size_t>(current_device)];
}

} // namespace

struct CUstream_st {
  CUstream_st(int device, unsigned flags) : device_(device), flags_(flags), worker_([this] { run(); }) {}
  // Ends the thread; nothing may be enqueued any more. The object stays: another thread may be about to wait for the stream.
  void end() {
    {
      const std::scoped_lock lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  int device() const { return device_; }
  bool waits_for_null_stream() const { return (flags_ & cudaStreamNonBlocking) == 0; }

  void enqueue(Task task) {
    const std::scoped_lock lock(mutex_);
    if (capture_) {
      capture_->add(this, std::move(task));
      return;
    }
    tasks_.push_back(std::move(task));
    ++num_enqueued_;
    changed_.notify_all();
  }
  bool is_idle() {
    const std::scoped_lock lock(mutex_);
    return num_done_ == num_enqueued_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    const size_t goal = num_enqueued_;
    changed_.wait(lock, [&] { return num_done_ >= goal; });
  }
  std::shared_ptr<GraphCapture> capture() {
    const std::scoped_lock lock(mutex_);
    return capture_;
  }
  // NULL ends it.
  std::shared_ptr<GraphCapture> set_capture(std::shared_ptr<GraphCapture> capture) {
    const std::scoped_lock lock(mutex_);
    return std::exchange(capture_, std::move(capture));
  }

private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
      ++num_done_;
      changed_.notify_all();
    }
  }

  int device_;
  unsigned flags_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t num_enqueued_ = 0;
  size_t num_done_ = 0;
  bool ends_ = false;
  std::shared_ptr<GraphCapture> capture_;
  std::thread worker_;
};

struct CUgraph_st {
  std::shared_ptr<Tasks> tasks;
};
struct CUgraphExec_st {
  std::shared_ptr<Tasks> tasks;
};
// An event's records and waits share this state. It outlives the event, as enqueued work does.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  size_t num_enqueued = 0, num_done = 0;
  std::chrono::steady_clock::time_point time;
};
struct CUevent_st {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  std::weak_ptr<GraphCapture> capture; // of the stream that recorded it last, if it was captured
  GraphCapture::Place place;
  bool is_of_capture = false;
};

namespace {

struct Allocation {
  size_t bytes;
  cudaMemoryType type;
  int device;
};
std::mutex memory_mutex;
std::map<const void*, Allocation>& allocations = *new std::map<const void*, Allocation>; // threads may outlive main()

cudaError_t allocate(void** memory, size_t bytes, cudaMemoryType type) {
  *memory = type == cudaMemoryTypeDevice && bytes > 0 && bytes % kExportedBlock == 0
                ? epx::emulation::allocate_exportable(bytes)
                : std::aligned_alloc(kMemoryAlignment, (bytes / kMemoryAlignment + 1) * kMemoryAlignment);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  const std::scoped_lock lock(memory_mutex);
  allocations[*memory] = {bytes, type, current_device};
  return cudaSuccess;
}

std::mutex streams_mutex;
std::set<cudaStream_t>& streams = *new std::set<cudaStream_t>;

// Returns the NULL stream of the current device. It is never destroyed: its thread may still run while the process ends.
CUstream_st& null_stream() {
  static std::array<CUstream_st*, kDevices>& device_streams = *new std::array<CUstream_st*, kDevices>{};
  const std::scoped_lock lock(streams_mutex);
  CUstream_st*& stream = device_streams[static_cast<size_t>(current_device)];
  if (stream == nullptr) stream = new CUstream_st(current_device, 0);
  return *stream;
}

CUstream_st& stream_of(cudaStream_t stream) {
  return stream != nullptr ? *stream : null_stream();
}

} // namespace

void epx::emulation::enqueue(cudaStream_t stream, Task task) {
  stream_of(stream).enqueue(std::move(task));
}
void epx::emulation::add_device_memory(const void* memory, size_t bytes) {
  const std::scoped_lock lock(memory_mutex);
  allocations[memory] = {bytes, cudaMemoryTypeDevice, current_device};
}
void epx::emulation::remove_device_memory(const void* memory) {
  const std::scoped_lock lock(memory_mutex);
  allocations.erase(memory);
}
void epx::emulation::end_context() {
  context_is_dead = true;
}
cudaError_t epx::emulation::context_error() {
  return context_is_dead ? cudaErrorLaunchFailure : cudaSuccess;
}

extern "C" {

// ---- Devices ----

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = multiprocessors();
  else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin)
    *value = kSharedBytes;
  else if (attribute == cudaDevAttrComputeCapabilityMajor)
    *value = compute_capability() / 10;
  else if (attribute == cudaDevAttrComputeCapabilityMinor)
    *value = compute_capability() % 10;
  else
    return cudaErrorInvalidValue;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  std::vector<cudaStream_t> all;
  {
    const std::scoped_lock lock(streams_mutex);
    std::copy_if(streams.begin(), streams.end(), std::back_inserter(all),
                 [](cudaStream_t stream) { return stream->device() == current_device; });
  }
  null_stream().wait();
  for (cudaStream_t stream : all)
    stream->wait();
  return epx::emulation::context_error();
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t shared_bytes) {
  *blocks = shared_bytes <= kSharedBytes ? 1 : 0;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "error of the emulation";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

// ---- Memory ----

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::scoped_lock lock(memory_mutex);
  size_t used = 0;
  for (const auto& [memory, allocation] : allocations)
    used += allocation.bytes;
  *total = kMemoryBytes;
  *free = kMemoryBytes - used;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate(memory, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  const std::scoped_lock lock(memory_mutex);
  auto found = allocations.upper_bound(pointer);
  if (found == allocations.begin()) return cudaSuccess;
  --found;
  const auto& [memory, allocation] = *found;
  if (static_cast<const std::byte*>(pointer) >= static_cast<const std::byte*>(memory) + allocation.bytes)
    return cudaSuccess;
  attributes->type = allocation.type;
  attributes->device = allocation.device;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  {
    const std::scoped_lock lock(driver_lock());
    cudaDeviceSynchronize();
  }
  {
    const std::scoped_lock lock(memory_mutex);
    allocations.erase(memory);
  }
  if (!epx::emulation::free_exportable(memory)) std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* memory) {
  return cudaFree(memory);
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned) {
  *on_device = memory;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return epx::emulation::export_memory(memory, handle->reserved) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  *memory = epx::emulation::open_exported(handle.reserved);
  return *memory != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  cudaDeviceSynchronize();
  return epx::emulation::free_exportable(memory) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream_of(stream).enqueue([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  stream_of(stream).enqueue([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  cudaMemsetAsync(memory, value, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}

// ---- Streams, events, graphs ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st(current_device, flags);
  const std::scoped_lock lock(streams_mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::scoped_lock lock(driver_lock(), streams_mutex);
    streams.erase(stream);
  }
  stream->end();
  static auto& ended = *new std::vector<cudaStream_t>;
  const std::scoped_lock lock(streams_mutex);
  ended.push_back(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).wait();
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (is_unsafe_beside_capture()) return cudaErrorStreamCaptureUnsupported;
  return stream_of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  stream_of(stream).enqueue([=] { function(argument); });
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  stream_of(stream).set_capture(std::make_shared<GraphCapture>(&stream_of(stream), mode));
  if (mode != cudaStreamCaptureModeRelaxed) ++num_own_captures;
  if (mode == cudaStreamCaptureModeGlobal) ++num_global_captures;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (stream == nullptr) {
    const std::scoped_lock lock(streams_mutex);
    for (cudaStream_t other : streams)
      if (other->device() == current_device && other->waits_for_null_stream() && other->capture() != nullptr)
        return cudaErrorStreamCaptureImplicit;
  }
  *status = stream_of(stream).capture() != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::shared_ptr<GraphCapture> capture = stream_of(stream).set_capture(nullptr);
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->mode() != cudaStreamCaptureModeRelaxed) --num_own_captures;
  if (capture->mode() == cudaStreamCaptureModeGlobal) --num_global_captures;
  for (CUstream_st* joined : capture->joined())
    joined->set_capture(nullptr);
  if (!capture->is_joined_up()) {
    *graph = nullptr;
    return cudaErrorStreamCaptureUnjoined;
  }
  *graph = new CUgraph_st{std::make_shared<Tasks>(capture->take())};
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->tasks};
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Task& task : *exec->tasks)
    stream_of(stream).enqueue(task);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::shared_ptr<GraphCapture> capture = stream_of(stream).capture();
  event->is_of_capture = capture != nullptr;
  if (capture != nullptr) { // the event then orders streams of the capture, and nothing else
    event->capture = capture;
    event->place = capture->place_of(&stream_of(stream));
    return cudaSuccess;
  }
  const std::shared_ptr<EventState> state = event->state;
  {
    const std::scoped_lock lock(state->mutex);
    ++state->num_enqueued;
  }
  stream_of(stream).enqueue([=] {
    const std::scoped_lock lock(state->mutex);
    state->time = std::chrono::steady_clock::now();
    ++state->num_done;
    state->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (is_unsafe_beside_capture()) return cudaErrorStreamCaptureUnsupported;
  if (event->is_of_capture) return cudaErrorCapturedEvent;
  std::unique_lock lock(event->state->mutex);
  event->state->changed.wait(lock, [&, goal = event->state->num_enqueued] { return event->state->num_done >= goal; });
  return epx::emulation::context_error();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::shared_ptr<GraphCapture> capture = stream_of(stream).capture();
  if (event->is_of_capture) {
    const std::shared_ptr<GraphCapture> of_event = event->capture.lock();
    if (of_event == nullptr) return cudaErrorCapturedEvent; // its capture has ended
    if (capture != nullptr && capture != of_event) return cudaErrorStreamCaptureMerge;
    if (capture == nullptr) stream_of(stream).set_capture(of_event);
    of_event->wait(&stream_of(stream), event->place);
    return cudaSuccess;
  }
  if (capture != nullptr) return cudaErrorStreamCaptureIsolation;
  const std::shared_ptr<EventState> state = event->state;
  const std::scoped_lock lock(state->mutex);
  stream_of(stream).enqueue([state, goal = state->num_enqueued] {
    std::unique_lock waiting(state->mutex);
    state->changed.wait(waiting, [&] { return state->num_done >= goal; });
  });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->state->time - begin->state->time).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::scoped_lock lock(driver_lock());
  delete event;
  return cudaSuccess;
}
}

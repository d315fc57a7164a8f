// SPDX-License-Identifier: Apache-2.0
// An Array owns elements in the memory of a Device, which must outlive it.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "apps/train_moe/device.h"

namespace train {

template <typename T>
class Array {
public:
  explicit Array(Device& device) : device_(&device) {}
  Array(Array&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Array& operator=(Array&&) = delete;
  ~Array() { device_->free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

  // Leaves the elements undefined. Throws Error.
  void resize(int64_t size) {
    if (size > capacity_) {
      device_->free(std::exchange(data_, nullptr));
      capacity_ = size_ = 0;
      data_ = static_cast<T*>(device_->allocate(static_cast<size_t>(size) * sizeof(T)));
      capacity_ = size;
    }
    size_ = size;
  }
  void clear() { device_->clear(data_, bytes(size_)); }

  void copy_in(int64_t first, std::span<const T> from) { device_->copy_in(data_ + first, from.data(), from.size_bytes()); }
  void copy_out(int64_t first, std::span<T> to) const { device_->copy_out(to.data(), data_ + first, to.size_bytes()); }
  void assign(std::span<const T> from) {
    resize(static_cast<int64_t>(from.size()));
    copy_in(0, from);
  }

  // Returns all elements in memory of the host: the array's own if it is there, else `mirror`, into which they are copied.
  std::span<const T> on_host(std::vector<T>& mirror) const {
    if (device_->is_host()) return {data_, static_cast<size_t>(size_)};
    mirror.resize(static_cast<size_t>(size_));
    copy_out(0, mirror);
    return mirror;
  }

private:
  static size_t bytes(int64_t size) { return static_cast<size_t>(size) * sizeof(T); }

  Device* device_;
  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

} // namespace train

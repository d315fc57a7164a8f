// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <algorithm>
#include <array>
#include <string>

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "failure.h"

namespace epx_torch {
namespace {

constexpr size_t kMaxDims = 4;

struct Dtype {
  ScalarType type;
  epx_dtype code;
  const char* name;
};

constexpr std::array<Dtype, 11> kDtypes = {{{ScalarType::Float, EPX_FLOAT32, "float32"},
                                            {ScalarType::Half, EPX_FLOAT16, "float16"},
                                            {ScalarType::BFloat16, EPX_BFLOAT16, "bfloat16"},
                                            {ScalarType::Int, EPX_INT32, "int32"},
                                            {ScalarType::Long, EPX_INT64, "int64"},
                                            {ScalarType::Double, EPX_FLOAT64, "float64"},
                                            {ScalarType::Byte, EPX_UINT8, "uint8"},
                                            {ScalarType::Float8_e4m3fn, EPX_FLOAT8_E4M3, "float8_e4m3fn"},
                                            {ScalarType::Float8_e5m2, EPX_FLOAT8_E5M2, "float8_e5m2"},
                                            {ScalarType::Float4_e2m1fn_x2, EPX_FLOAT4_E2M1, "float4_e2m1fn_x2"},
                                            {ScalarType::Float8_e8m0fnu, EPX_FLOAT8_E8M0, "float8_e8m0fnu"}}};

const Dtype* find_dtype(ScalarType type) {
  const auto found = std::ranges::find(kDtypes, type, &Dtype::type);
  return found == kDtypes.end() ? nullptr : &*found;
}

std::string names_of(std::initializer_list<ScalarType> dtypes) {
  std::string names;
  for (const ScalarType dtype : dtypes)
    names += (names.empty() ? "" : " or ") + std::string(find_dtype(dtype)->name);
  return names;
}

template <typename Sizes>
std::string in_brackets(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes)
    text += (text.empty() ? "" : ", ") + (size == kAnySize ? "any" : std::to_string(size));
  return "[" + text + "]";
}

std::string place_name(const Place& place) {
  return place.is_cuda ? "cuda:" + std::to_string(place.device_index) : "cpu";
}

void require_place(const char* name, const Tensor& tensor, const Place& place) {
  if (place.is_cuda ? tensor.is_cuda() && tensor.get_device_index() == place.device_index : tensor.is_cpu()) return;
  std::string is = "another kind of device";
  if (tensor.is_cpu()) is = "cpu";
  if (tensor.is_cuda()) is = "cuda:" + std::to_string(tensor.get_device_index());
  refuse(name, " is on ", is, "; the tensors of this group are on ", place_name(place));
}

void require_contiguous(const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous())
    refuse(name, " has strides ", in_brackets(tensor.strides()), " at shape ", in_brackets(tensor.sizes()),
           ": it must be contiguous in row-major order");
}

// PyTorch counts bytes of float4_e2m1fn_x2, and the C API elements, of which a byte has two.
epx_tensor make_view(void* data, epx_dtype dtype, std::span<const int64_t> sizes) {
  epx_tensor result = {};
  result.data = data;
  result.dtype = dtype;
  result.ndim = static_cast<int32_t>(sizes.size());
  std::ranges::copy(sizes, result.sizes);
  if (dtype == EPX_FLOAT4_E2M1) result.sizes[sizes.size() - 1] *= 2;
  return result;
}

Tensor make_tensor(int32_t device_type, int32_t device_index, std::span<const int64_t> shape, ScalarType dtype) {
  std::array<int64_t, kMaxDims> strides = {};
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(shape[dim], 1);
  }
  AtenTensorHandle handle = nullptr;
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), type, device_type,
                               device_index, &handle) != AOTI_TORCH_SUCCESS)
    fail(EPX_ERROR_OUT_OF_MEMORY, "PyTorch could not allocate a tensor of " + std::string(find_dtype(dtype)->name) + " " +
                                      in_brackets(shape) + ", which the call returns");
  return Tensor(handle);
}

} // namespace

epx_tensor view(const char* name, const Tensor& tensor, const Place& place, std::initializer_list<int64_t> shape,
                std::initializer_list<ScalarType> dtypes) {
  require_place(name, tensor, place);
  const ScalarType type = tensor.scalar_type();
  const Dtype* const dtype = find_dtype(type);
  if (std::ranges::find(dtypes, type) == dtypes.end())
    refuse(name, " is ", dtype == nullptr ? "of another dtype" : dtype->name, "; it must be ", names_of(dtypes));
  const auto sizes = tensor.sizes();
  const bool fits = sizes.size() == shape.size() &&
                    std::equal(shape.begin(), shape.end(), sizes.begin(),
                               [](int64_t wanted, int64_t is) { return wanted == kAnySize || wanted == is; });
  if (!fits) refuse(name, " has shape ", in_brackets(sizes), "; it must be ", in_brackets(shape));
  require_contiguous(name, tensor);
  return make_view(tensor.data_ptr(), dtype->code, {sizes.data(), sizes.size()});
}

epx_tensor view_as_bytes(const char* name, const Tensor& rows, const Place& place) {
  require_place(name, rows, place);
  require_contiguous(name, rows);
  const auto sizes = rows.sizes();
  if (sizes.empty()) refuse(name, " has shape []; it must have at least one dimension, that of its rows");
  auto row_bytes = static_cast<int64_t>(rows.element_size());
  for (size_t dim = 1; dim < sizes.size(); ++dim)
    row_bytes *= sizes[dim];
  return epx_tensor_2d(rows.data_ptr(), EPX_UINT8, sizes[0], row_bytes);
}

ScalarType scalar_type(const char* name, epx_dtype dtype) {
  const auto found = std::ranges::find(kDtypes, dtype, &Dtype::code);
  if (found == kDtypes.end()) refuse(name, " has dtype ", static_cast<int>(dtype), ", which is none of epx.h");
  return found->type;
}

Tensor new_tensor(const Place& place, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return new_tensor(place, std::span(shape.begin(), shape.size()), dtype);
}

Tensor new_tensor(const Place& place, std::span<const int64_t> shape, ScalarType dtype) {
  return place.is_cuda ? make_tensor(aoti_torch_device_type_cuda(), place.device_index, shape, dtype)
                       : make_tensor(aoti_torch_device_type_cpu(), 0, shape, dtype);
}

Tensor new_host_tensor(std::initializer_list<int64_t> shape, ScalarType dtype) {
  return make_tensor(aoti_torch_device_type_cpu(), 0, {shape.begin(), shape.size()}, dtype);
}

epx_tensor view_of_new(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return make_view(tensor.data_ptr(), find_dtype(tensor.scalar_type())->code, {sizes.data(), sizes.size()});
}

epx_tensor view_of_part(const Tensor& tensor, int64_t first_byte, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return make_view(static_cast<char*>(tensor.data_ptr()) + first_byte, find_dtype(dtype)->code,
                   {shape.begin(), shape.size()});
}

epx_stream current_stream(const Place& place) {
  if (!place.is_cuda) return nullptr;
  // libtorch_cuda is part of PyTorch's builds for CUDA alone, so this library does not link it.
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto function = []() -> Function {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (function == nullptr || function(place.device_index, &stream) != AOTI_TORCH_SUCCESS)
    fail(EPX_ERROR_SYSTEM, "PyTorch does not tell its current stream of cuda:" + std::to_string(place.device_index));
  return stream;
}

} // namespace epx_torch

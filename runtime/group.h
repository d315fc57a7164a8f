// SPDX-License-Identifier: Apache-2.0
// A Group is this rank's view of the ranks that share the experts, and owns everything that lives as long as they do.
#pragma once

#include <memory>

#include "epx/epx.h"
#include "runtime/backend.h"
#include "runtime/group_context.h"

namespace epx {

class BootstrapExchange;

class Group {
public:
  // The call is collective over the bootstrap; all ranks succeed or all throw.
  static std::unique_ptr<Group> create(const epx_bootstrap& bootstrap, const epx_group_config& config);

  const GroupContext& context() const { return context_; }
  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }

private:
  static std::unique_ptr<Group> create(const epx_bootstrap& bootstrap, const epx_group_config& config,
                                       BootstrapExchange& exchange);
  // make_backend(context) returns the backend, which may refer to the context.
  template <typename MakeBackend>
  Group(const GroupContext& context, const MakeBackend& make_backend)
      : context_(context), backend_(make_backend(context_)) {}

  const GroupContext context_;
  std::unique_ptr<Backend> backend_;
};

} // namespace epx

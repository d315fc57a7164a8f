// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/moe_layer.h"

#include <algorithm>
#include <numeric>

namespace train {

MoeLayer::MoeLayer(const ModelOptions& model, double aux_loss) : model_(model), aux_loss_(aux_loss) {}

double MoeLayer::load() const {
  std::vector<int64_t> routes(model_.experts);
  for (size_t i = 0; i < global_counts_.size(); ++i)
    routes[i % model_.experts] += global_counts_[i];
  const auto total = std::accumulate(routes.begin(), routes.end(), int64_t{0});
  if (total == 0) return 0;
  return static_cast<double>(*std::max_element(routes.begin(), routes.end()) * model_.experts) / static_cast<double>(total);
}

} // namespace train

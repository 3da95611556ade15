// SPDX-License-Identifier: Apache-2.0
// A training run that takes milliseconds a step, on every rank of a mesh.
#pragma once

#include <cstdint>
#include <string>

#include "data/corpus.h"
#include "options/config.h"
#include "options/options.h"
#include "support/random.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/mesh.h"
#include "training/trainer.h"

namespace switchyard::train {

// Words in an order that can be learnt a little.
inline std::string small_text() {
  testing::Random random(1);
  std::string text;
  while (text.size() < 20'000) {
    for (const char* word : {"the ", "switch ", "yard "}) {
      if (random.below(3) > 0) text += word;
    }
    text += random.below(5) == 0 ? ".\n" : "and ";
  }
  return text;
}

inline TrainConfig small_config() {
  TrainConfig config;
  config.model.layers = 3;
  config.model.hidden = 16;
  config.model.heads = 2;
  config.model.context = 16;
  config.model.experts = 5;
  config.model.intermediate = 8;
  config.model.shared_intermediate = 8;
  config.model.moe_every = 2;  // the layer in the middle has experts
  config.model.dense_intermediate = 24;
  config.data.batch = 4;
  config.data.held_out = 4;
  config.optimizer.warm_up = 2;
  config.steps = 20;
  return config;
}

inline TrainConfig with_mesh(TrainConfig config, const MeshConfig& mesh) {
  config.mesh = mesh;
  return config;
}

// One rank's part of a small training run.
struct SmallRun {
  SmallRun(Communicator& world, const TrainConfig& config)
      : mesh(world, mesh_axes(config.mesh, world.size())),
        corpus("small", small_text()),
        trainer(config, mesh, Device(), corpus) {}

  Mesh mesh;
  Corpus corpus;
  Trainer trainer;
};

}  // namespace switchyard::train

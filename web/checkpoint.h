// A checkpoint whose tensors the page has filled in.
#pragma once

#include <map>
#include <string>

#include "buffer.h"
#include "generation/csrc/decoder.h"
#include "refuse.h"

struct Checkpoint {
    struct Tensor {
        Buffer data;
        int64_t floats = 0;
    };

    ModelShape shape;
    std::map<std::string, Tensor> tensors;

    Tensors lookup() const {
        return [this](const std::string& name, int64_t floats) -> const float* {
            const auto found = tensors.find(name);
            if (found == tensors.end()) {
                if (name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0) return nullptr;
                refuse(("the checkpoint has no " + name).c_str());
            }
            if (found->second.floats != floats) refuse((name + " has a wrong size").c_str());
            return found->second.data;
        };
    }
};

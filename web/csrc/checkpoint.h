// A checkpoint whose tensors the page has filled in. The page has checked their names and sizes.
#pragma once

#include <map>
#include <string>

#include "buffer.h"
#include "generation/csrc/decoder.h"

struct Checkpoint {
    ModelShape shape;
    std::map<std::string, Buffer> tensors;

    Tensors lookup() const {
        return [this](const std::string& name, int64_t) -> const float* {
            const auto found = tensors.find(name);
            if (found == tensors.end()) return nullptr;  // a bias that the model does not have
            return found->second;
        };
    }
};

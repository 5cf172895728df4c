// The page's interface: functions exported as page_NAME, with C's types and 32-bit sizes. The page has checked
// the arguments and a checkpoint's tensors.
#pragma once

#include <map>
#include <string>

#include "buffer.h"
#include "generation/csrc/decoder.h"

#define EXPORT(name) extern "C" __attribute__((export_name("page_" #name)))

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

// How the integer attributes of an FFI call are decoded: by a table for each structure that takes some of them.
// operation.cc has the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>

#include "cuda_kernels/core/params.h"
#include "ffi/devices.h"
#include "xla/ffi/api/ffi.h"

namespace xen_moe {

// One attribute: its name, the field that it is decoded into, and the values that it may have.
template <class Struct>
struct Attribute {
  const char* name;
  std::variant<int Struct::*, bool Struct::*, uint8_t Struct::*, uint32_t Struct::*, uint64_t Struct::*,
               Layout Struct::*, WireType Struct::*>
      field;
  int64_t low = 0, high = 1;
};

// Looks attributes up by name: in the dictionary that XLA gives to a handler, or in one of Python's, for size hints.
class Attributes {
 public:
  using Lookup = std::function<xla::ffi::ErrorOr<int64_t>(const char*)>;
  explicit Attributes(Lookup lookup) : lookup_(std::move(lookup)) {}

  // Decodes every attribute of `table` into its field of `to`. Throws MemoryError where one is absent or out of range.
  template <class Struct, size_t N>
  void Decode(const Attribute<Struct> (&table)[N], Struct* to) const {
    for (const Attribute<Struct>& attribute : table) {
      const int64_t value = Int(attribute.name, attribute.low, attribute.high);
      std::visit([&](auto field) { Assign(value, &(to->*field)); }, attribute.field);
    }
  }

 private:
  template <class Field>
  static void Assign(int64_t value, Field* field) {
    *field = static_cast<Field>(value);
  }

  int64_t Int(const char* name, int64_t low, int64_t high) const {
    const xla::ffi::ErrorOr<int64_t> value = lookup_(name);
    if (!value.has_value()) Refuse(std::string("attribute ") + name + " is missing or not an int64");
    if (*value < low || *value > high) {
      Refuse(std::string("attribute ") + name + " = " + std::to_string(*value) + ": must be in [" +
             std::to_string(low) + ", " + std::to_string(high) + "]");
    }
    return *value;
  }

  Lookup lookup_;
};

}  // namespace xen_moe

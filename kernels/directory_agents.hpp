// The agents that a window directory knows, and who may speak for them. docs/WINDOWS.md says why it is as it is.
//
// An agent is its address. The start of it that spoke last, by (incarnation, token), owns the name for as long as a connection of it is
// open; a later start takes over once none is. A number is given to another agent only when no entry can name it any more.
#pragma once
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "directory_table.hpp"

namespace kv::directory {

struct Agent {
  std::string address;         // "": a free number
  uint64_t incarnation = 0, token = 0;
  uint64_t heard = 0;          // tick of its last word
  uint32_t connections = 0;    // open ones on which it has spoken
  bool hidden = false;         // reported while it had no connection, and silent since
  uint64_t answer = 0;         // the LOCATE that it was last named in, and its ordinal there
  uint32_t ordinal = 0;
};

struct Speaker {
  std::string_view address;
  uint64_t incarnation, token;
};

class Agents {
 public:
  explicit Agents(Table& table) : table_(table), rows_(1) {}
  // OK: `conn_agent` is its number. NOT_FOUND: unknown, and not to be made known. SUPERSEDED, BUSY, BAD_REQUEST: it may not speak here.
  Status speak(const Speaker& who, bool introduce, uint64_t now, uint32_t& conn_agent);
  void closed(uint32_t conn_agent);
  bool report(std::string_view address, uint64_t incarnation);   // is it left out of answers from now on?
  void forget_silent(uint64_t now);
  Agent& operator[](uint32_t number) { return rows_[number]; }

  Counter known{0}, connected{0}, hidden{0}, reports{0}, superseded{0};

 private:
  uint32_t add(std::string_view address);
  void show(Agent& agent);

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };
  Table& table_;
  std::vector<Agent> rows_;    // by number; the first is nobody
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> numbers_;
};

}  // namespace kv::directory

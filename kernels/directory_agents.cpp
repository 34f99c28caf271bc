// See directory_agents.hpp.
#include "directory_agents.hpp"

namespace kv::directory {

uint32_t Agents::add(std::string_view address) {
  uint32_t number;
  if (!free_.empty()) {
    number = free_.back();
    free_.pop_back();
  } else if (rows_.size() <= AGENTS_MAX) {
    number = uint32_t(rows_.size());
    rows_.emplace_back();
  } else {
    return 0;
  }
  rows_[number] = {};
  rows_[number].address = address;
  numbers_.emplace(address, number);
  bump(known);
  return number;
}

void Agents::show(Agent& agent) {
  if (agent.hidden) drop(hidden);
  agent.hidden = false;
}

Status Agents::speak(const Speaker& who, bool introduce, uint64_t now, uint32_t& conn_agent) {
  const auto found = numbers_.find(who.address);
  uint32_t number = found == numbers_.end() ? 0 : found->second;
  if (conn_agent && conn_agent != number) return Status::BAD_REQUEST;   // one connection, one agent
  const bool is_new = !number;
  if (is_new) {
    if (!introduce) return Status::NOT_FOUND;
    number = add(who.address);
    if (!number) return Status::BUSY;
  }
  Agent& agent = rows_[number];
  if (is_new) {
    agent.incarnation = who.incarnation;
    agent.token = who.token;
  } else if (agent.incarnation != who.incarnation || agent.token != who.token) {
    const uint32_t others = agent.connections - (conn_agent == number);
    if (who.incarnation <= agent.incarnation || others) {
      bump(superseded);
      return Status::SUPERSEDED;
    }
    if (!table_.wipe(number, now)) return Status::BUSY;
    agent.incarnation = who.incarnation;
    agent.token = who.token;
  }
  if (!conn_agent) {
    conn_agent = number;
    if (!agent.connections++) bump(connected);
  }
  agent.heard = now;
  show(agent);
  return Status::OK;
}

void Agents::closed(uint32_t conn_agent) {
  if (conn_agent && !--rows_[conn_agent].connections) drop(connected);
}

bool Agents::report(std::string_view address, uint64_t incarnation) {
  bump(reports);
  const auto found = numbers_.find(address);
  if (found == numbers_.end()) return false;
  Agent& agent = rows_[found->second];
  if (agent.incarnation != incarnation || agent.connections) return false;   // we hear it: one word against another
  if (!agent.hidden) bump(hidden);
  agent.hidden = true;
  return true;
}

void Agents::forget_silent(uint64_t now) {
  for (uint32_t number = 1; number < rows_.size(); number++) {
    Agent& agent = rows_[number];
    if (agent.address.empty() || agent.connections || now - agent.heard <= 2 * TICKS) continue;   // its entries have expired long ago
    show(agent);
    numbers_.erase(agent.address);
    agent = {};
    free_.push_back(number);
    drop(known);
  }
}

}  // namespace kv::directory

// What daemons and clients both ask of the kernel's TCP.
#pragma once
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string>

namespace kv {

// A host's default may pace every connection (BBR), which is meant for the wide area: within a rack it cost half of the processor time
// of a load (docs/PERFORMANCE.md). An algorithm that this kernel lacks, or does not allow, leaves the host's; so does "".
// To be called before a connection is made (a listener's is inherited): a pacing timer that has been set up once stays.
inline void set_congestion_control(int fd, const std::string& name) {
  if (!name.empty()) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), socklen_t(name.size()));
}

}  // namespace kv

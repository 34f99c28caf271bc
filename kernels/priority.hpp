// Who waits comes first: threads that store, evict and tidy up run behind those that read and look up.
#pragma once
#include <sys/resource.h>

namespace kv {

inline constexpr int BACKGROUND_NICE = 12;   // a fifteenth of a reading thread's share while both want the processor, all of it else

// For the calling thread. Where it is refused, the thread stays as it was.
inline void give_way_to_loads() { (void)!setpriority(PRIO_PROCESS, 0, BACKGROUND_NICE); }   // 0: this thread, as Linux has it

}  // namespace kv

// The machine (machine.h): its parts in one unit, as the compiler sees across them and reads each header once.
#include "machine/scheduler.cpp"
#include "machine/polls.cpp"
#include "machine/meetings.cpp"
#include "machine/copies.cpp"
#include "machine/report.cpp"
#include "machine/launch.cpp"

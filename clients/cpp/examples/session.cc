// Tracks an object through a camera's frames: session ADDRESS OBJECT [FRAMES]. The camera is a grey card here.

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include <legato/client.h>

namespace {

/// Return a frame as a driver would: a buffer that the last reference returns.
legato::Image capture() {
  const auto pixels = std::make_shared<std::vector<unsigned char>>(640 * 480 * 3, 128);
  return legato::Image::raw({640, 480, legato::PixelFormat::bgr8}, pixels->data(), pixels->size(), pixels);
}

void send_frames(legato::Session& session, int count) {
  using namespace std::chrono_literals;
  for (int i = 0; i < count; ++i) {
    legato::Frame frame{capture()};
    frame.stamp.frame_id = "front";
    frame.stamp.capture_time = std::chrono::system_clock::now();
    session.try_send(std::move(frame));  // without a credit the frame is skipped: the next one is newer
    std::this_thread::sleep_for(33ms);
  }
  session.finish();
}

void print(const legato::FrameResult& outcome) {
  std::cout << "frame " << outcome.stamp.sequence << ": ";
  if (const auto* error = std::get_if<legato::Error>(&outcome.result.result)) {
    std::cout << error->what() << "\n";
  } else if (const auto* found = std::get_if<legato::DetectResult>(&outcome.result.result)) {
    for (const auto& object : found->objects) std::cout << object.label << " #" << object.track_id << " ";
    std::cout << "\n";
  }
}

void run(const std::string& address, const std::string& object, int count) {
  const legato::Client client(address);
  legato::DetectTask task{object};
  task.tracking = std::chrono::seconds(2);
  legato::SessionConfig config;
  config.tasks = {task};
  legato::Session session = client.open_session(config);
  std::thread camera([&] {
    try {
      send_frames(session, count);
    } catch (const legato::Error&) {  // the loop below has the reason
    }
  });
  try {
    for (const legato::SessionEvent& event : session) {
      if (const auto* result = std::get_if<legato::FrameResult>(&event)) print(*result);
      if (const auto* drop = std::get_if<legato::FrameDropped>(&event))
        std::cout << "frame " << drop->sequence << ": dropped\n";
    }
  } catch (const legato::Error&) {
    camera.join();
    throw;
  }
  camera.join();
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::cerr << "usage: session ADDRESS OBJECT [FRAMES]\n";
    return 2;
  }
  try {
    run(words[1], words[2], count > 3 ? std::atoi(words[3]) : 30);
  } catch (const legato::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

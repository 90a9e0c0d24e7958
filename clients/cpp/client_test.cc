// Asks a server of the null engine, a step of which takes some ms: client_test ADDRESS. With CA CERTIFICATE KEY TOKEN, all
// files, it asks one that has TLS and tokens. Prints nothing where all is as it should be.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <thread>

#include "legato/client.h"

namespace {

using namespace legato;
using namespace std::chrono_literals;

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << " is false\n"; \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (false)

/// The Error of a call that must fail.
#define ERROR_OF(...) error_of(__LINE__, [&] { __VA_ARGS__; })

template <typename Call>
Error error_of(int line, Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  std::cerr << __FILE__ << ":" << line << ": the call did not fail\n";
  std::exit(1);
}

/// Return a frame of grey pixels; `released` counts the owners that are gone.
Image grey(std::atomic<int>* released = nullptr, std::uint32_t side = 64) {
  auto* pixels = new std::vector<unsigned char>(3 * side * side, 128);
  std::shared_ptr<const void> owner(pixels->data(), [=](const void*) {
    delete pixels;
    if (released != nullptr) ++*released;
  });
  return Image::raw({side, side, PixelFormat::rgb8}, pixels->data(), pixels->size(), owner);
}

void test_every_skill_answers(const Client& client) {
  const Image image = grey();
  CallOptions options;
  options.request_id = "cpp-detect";
  options.stamp.frame_id = "front";
  options.stamp.capture_time = std::chrono::system_clock::time_point(1'700'000'000s);
  options.stamp.sequence = 7;
  const DetectResult found = client.detect(image, {"cup", 2}, options);
  CHECK(found.info.request_id == "cpp-detect" && !found.info.model.empty());
  CHECK(found.info.image_width == 64 && found.info.image_height == 64);
  CHECK(found.info.stamp.frame_id == "front" && found.info.stamp.sequence == 7);
  CHECK(found.info.stamp.capture_time == options.stamp.capture_time);
  CHECK(!found.objects.empty() && found.objects.size() <= 2);
  for (const Detection& each : found.objects) CHECK(each.label == "cup" && each.box.x_min < each.box.x_max);
  CHECK(!client.point(image, {"cup"}).points.empty());
  CHECK(client.segment(image, {"cup"}).segments.size() == 1);
  CHECK(!client.caption(image, {CaptionLength::brief}).caption.empty());
  CHECK(!client.query({}, {"Why?"}).answer.empty());
}

void test_a_question_about_several_images(const Client& client) {
  QueryTask task{"Which?"};
  task.images = {{grey()}, {grey(nullptr, 32)}};
  const Info info = client.query({}, task).info;
  CHECK(info.image_ids.size() == 2 && info.image_ids[0] == info.image_id && info.image_width == 64);
  task.images = {{grey(), 0ms}, {Image::held(info.image_ids[1]), 500ms}};
  for (const Event& event : client.generate({}, task))
    if (const auto* end = std::get_if<Finished>(&event)) CHECK(end->info.image_ids == info.image_ids);
  task.images[1].time = 0ms;
  CHECK(ERROR_OF(client.query({}, task)).metadata.at("field") == "images[1].time");
  task.images[1] = {Image::encoded("no image")};
  CHECK(ERROR_OF(client.query({}, task)).reason == "IMAGE_UNDECODABLE");
}

void test_the_format_of_an_answer_is_sent(const Client& client) {
  QueryTask task{"Which?"};
  const std::pair<ResponseFormat, std::string> wrong[] = {
      {JsonSchema{std::string(65'537, ' ')}, "json_schema"},
      {Regex{std::string(65'537, 'x')}, "regex"},
      {Choices{{std::string(4'097, 'x')}}, "choices.texts[0]"},
      {Grammar{std::string(65'537, ' ')}, "grammar"}};
  for (const auto& [format, field] : wrong) {
    task.response_format = format;
    CHECK(ERROR_OF(client.query({}, task)).metadata.at("field") == "response_format." + field);
    CHECK(ERROR_OF(client.generate({}, task).next()).metadata.at("field") == "task.query.response_format." + field);
  }
}

void test_an_error_names_the_field(const Client& client) {
  DetectTask task{"cup"};
  task.sampling.top_p = 2;
  const Error error = ERROR_OF(client.detect(grey(), task));
  CHECK(error.code == grpc::StatusCode::INVALID_ARGUMENT && error.reason == "INVALID_FIELD");
  CHECK(error.field_violations.size() == 1 && error.field_violations[0].field == "sampling.top_p");
  CHECK(!error.request_id.empty() && error.metadata.at("field") == "sampling.top_p");
  CHECK(ERROR_OF(client.detect(Image::encoded("no image"), {"cup"})).reason == "IMAGE_UNDECODABLE");
  CHECK(ERROR_OF(client.detect(Image::held("img_0"), {"cup"})).reason == "IMAGE_NOT_FOUND");
}

void test_what_cannot_work_is_refused_before_it_is_sent() {
  CHECK(ERROR_OF(Client("http://127.0.0.1:1")).code == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(ERROR_OF(Client("robots")).code == grpc::StatusCode::INVALID_ARGUMENT);
  ClientOptions options;
  options.token = "secret";
  CHECK(ERROR_OF(Client("robots.example:50051", options)).code == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(ERROR_OF(Image::file("/no/such/file")).code == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(ERROR_OF(Image::raw({1, 1}, "abc", 3, nullptr)).code == grpc::StatusCode::INVALID_ARGUMENT);
}

void test_gRPC_lets_go_of_pixels(const Client& client) {
  std::atomic<int> released{0};
  client.detect(grey(&released, 512), {"cup"});
  for (int i = 0; i < 1000 && released == 0; ++i) std::this_thread::sleep_for(10ms);
  CHECK(released == 1);
}

void test_a_stream_tells_its_result(const Client& client) {
  std::string told;
  bool started = false;
  std::optional<Finished> finished;
  for (const Event& event : client.generate(grey(), CaptionTask{})) {
    CHECK(!finished);
    if (std::holds_alternative<Started>(event)) started = true;
    if (const auto* delta = std::get_if<TextDelta>(&event)) told += delta->text;
    if (const auto* end = std::get_if<Finished>(&event)) finished = *end;
  }
  CHECK(started && finished && !told.empty());
  CHECK(std::get<CaptionResult>(finished->result.result).caption == told);

  std::size_t objects = 0;
  for (const Event& event : client.generate(grey(), DetectTask{"cup"})) {
    if (std::holds_alternative<Detection>(event)) ++objects;
    if (const auto* end = std::get_if<Finished>(&event))
      CHECK(std::get<DetectResult>(end->result.result).objects.size() == objects);
  }
  CHECK(objects > 0);
}

void test_a_cancelled_stream_ends(const Client& client) {
  Stream stream = client.generate(grey(), CaptionTask{});
  CHECK(stream.next());
  std::thread([&] { stream.cancel(); }).join();
  CHECK(ERROR_OF(while (stream.next()) {}).code == grpc::StatusCode::CANCELLED);
  client.generate(grey(), CaptionTask{}).next();  // leaving it cancels as well: the harness counts what runs
  CallOptions hurried;
  hurried.timeout = 1ms;
  Stream late = client.generate(grey(), CaptionTask{}, hurried);
  CHECK(ERROR_OF(while (late.next()) {}).code == grpc::StatusCode::DEADLINE_EXCEEDED);
}

SessionConfig cups(FramePolicy policy) {
  SessionConfig config;
  DetectTask task{"cup"};
  task.id = "cups";
  config.tasks = {task};
  config.policy = policy;
  return config;
}

void test_every_frame_has_its_outcome(const Client& client, FramePolicy policy) {
  constexpr int kFrames = 20;
  Session session = client.open_session(cups(policy));
  CHECK(!session.id().empty() && !session.model().empty() && session.credits() > 0);
  std::thread sender([&] {
    for (int i = 0; i < kFrames; ++i) session.send({grey()});
    session.finish();
  });
  std::map<std::uint64_t, int> outcomes;
  std::uint64_t dropped = 0;
  for (const SessionEvent& event : session) {
    if (const auto* result = std::get_if<FrameResult>(&event)) {
      CHECK(result->last && result->result.task_id == "cups");
      CHECK(!std::get<DetectResult>(result->result.result).objects.empty());
      ++outcomes[result->stamp.sequence];
    } else if (const auto* drop = std::get_if<FrameDropped>(&event)) {
      CHECK(drop->reason == DropReason::superseded && drop->total == ++dropped);
      ++outcomes[drop->sequence];
    }
  }
  sender.join();
  CHECK(outcomes.size() == kFrames && outcomes.begin()->first == 1 && outcomes.rbegin()->first == kFrames);
  for (const auto& [sequence, count] : outcomes) CHECK(count == 1);
  CHECK(policy != FramePolicy::every_frame || dropped == 0);
}

void test_a_frame_without_credit_is_not_sent(const Client& client) {
  Session session = client.open_session(cups(FramePolicy::every_frame));
  const std::uint32_t credits = session.credits();
  for (std::uint32_t i = 0; i < credits; ++i) CHECK(session.try_send({grey()}));
  CHECK(session.credits() == 0 && !session.try_send({grey()}));
  while (session.credits() == 0) CHECK(session.next());
  CHECK(session.try_send({grey()}) == credits + 1);
}

void test_tasks_change_and_fail_alone(const Client& client) {
  Session session = client.open_session(cups(FramePolicy::every_frame));
  CaptionTask caption;
  caption.id = "words";
  session.update({caption});
  session.send({grey()});
  session.send({Image::encoded("no image")});
  session.finish();
  std::set<std::uint64_t> answered, failed;
  for (const SessionEvent& event : session) {
    const auto* result = std::get_if<FrameResult>(&event);
    if (result == nullptr) continue;
    CHECK(result->result.task_id == "words");
    if (const auto* error = std::get_if<Error>(&result->result.result)) {
      CHECK(error->reason == "IMAGE_UNDECODABLE");
      failed.insert(result->stamp.sequence);
    } else {
      answered.insert(result->stamp.sequence);
    }
  }
  CHECK(answered == std::set<std::uint64_t>{1} && failed == std::set<std::uint64_t>{2});
}

void test_the_end_of_a_session_wakes_its_senders(const Client& client) {
  Session session = client.open_session(cups(FramePolicy::every_frame));
  std::optional<Error> ended;
  std::thread sender([&] {
    ended = ERROR_OF(while (true) session.send({grey()}));
  });
  CHECK(session.next());
  session.cancel();
  CHECK(ERROR_OF(while (session.next()) {}).code == grpc::StatusCode::CANCELLED);
  sender.join();
  CHECK(ended->code == grpc::StatusCode::UNAVAILABLE);
  CHECK(ERROR_OF(session.send({grey()})).code == grpc::StatusCode::UNAVAILABLE);
  CHECK(ERROR_OF(session.next()).code == grpc::StatusCode::CANCELLED);
  SessionConfig unknown = cups(FramePolicy::latest_wins);
  unknown.model = "no-such-model";
  CHECK(ERROR_OF(client.open_session(unknown)).reason == "MODEL_NOT_FOUND");
}

std::string read_file(const std::string& path, char end = 0) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text, end);
  return text;
}

void test_a_secured_server_answers_and_is_checked(const std::string& address, char** files) {
  ClientOptions options;
  options.tls = true;
  options.ca = read_file(files[0]);
  options.certificate = read_file(files[1]);
  options.key = read_file(files[2]);
  options.token = read_file(files[3], '\n');
  CHECK(!Client(address, options).query({}, {"Why?"}).answer.empty());
  options.ca.clear();
  CHECK(ERROR_OF(Client(address, options).query({}, {"Why?"})).code == grpc::StatusCode::UNAVAILABLE);
}

}  // namespace

int main(int count, char** words) {
  if (count != 2 && count != 6) {
    std::cerr << "usage: client_test ADDRESS [CA CERTIFICATE KEY TOKEN]\n";
    return 2;
  }
  try {
    if (count == 6) {
      test_a_secured_server_answers_and_is_checked(words[1], words + 2);
      return 0;
    }
    const Client client(words[1]);
    test_every_skill_answers(client);
    test_a_question_about_several_images(client);
    test_the_format_of_an_answer_is_sent(client);
    test_an_error_names_the_field(client);
    test_what_cannot_work_is_refused_before_it_is_sent();
    test_gRPC_lets_go_of_pixels(client);
    test_a_stream_tells_its_result(client);
    test_a_cancelled_stream_ends(client);
    for (const FramePolicy policy : {FramePolicy::latest_wins, FramePolicy::every_frame})
      test_every_frame_has_its_outcome(client, policy);
    test_a_frame_without_credit_is_not_sent(client);
    test_tasks_change_and_fail_alone(client);
    test_the_end_of_a_session_wakes_its_senders(client);
  } catch (const Error& error) {
    std::cerr << "unexpected: " << error.what() << " [" << error.reason << "]\n";
    return 1;
  }
}

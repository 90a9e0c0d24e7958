#include <algorithm>
#include <set>

#include "call.h"
#include "convert.h"

namespace legato {

namespace {

using Code = grpc::StatusCode;

v1::SessionRequest open_of(const SessionConfig& config) {
  v1::SessionRequest request;
  v1::SessionOpen& open = *request.mutable_open();
  open.set_session_name(config.name);
  open.set_model(config.model);
  open.set_adapter(config.adapter);
  for (const Task& task : config.tasks) *open.add_standing_tasks() = message_of(task);
  open.set_frame_policy(static_cast<v1::FramePolicy>(config.policy));
  open.set_max_in_flight(config.max_in_flight);
  if (config.max_frame_age) *open.mutable_max_frame_age() = message_of(*config.max_frame_age);
  open.set_response_credits(config.response_credits);
  return request;
}

v1::Frame message_of(const Frame& frame) {
  v1::Frame message;
  *message.mutable_stamp() = legato::message_of(frame.stamp);
  for (const Task& task : frame.extra_tasks) *message.add_extra_tasks() = legato::message_of(task);
  message.set_skip_standing_tasks(frame.skip_standing_tasks);
  message.set_must_run(frame.must_run);
  return message;
}

}  // namespace

/// A session's call, and the frames that the server has yet to accept or drop.
struct Session::State {
  std::unique_ptr<Call> call;
  v1::SessionOpened terms;
  std::uint64_t index = 0;  // of the next message; next()'s own

  std::mutex sending;  // keeps sequences in order on the wire; taken before `mutex`
  std::uint64_t sequence = 0;

  std::mutex mutex;
  std::condition_variable changed;
  std::uint32_t window = 0;
  std::set<std::uint64_t> unresolved;
  bool ended = false;

  bool has_credit() const { return unresolved.size() < window; }

  bool receive(v1::SessionResponse& message, std::optional<Clock::time_point> until = {}) {
    if (!call->read(message, until)) return false;
    if (message.index() != index++)
      throw failure(Code::UNAVAILABLE, "message " + std::to_string(index - 1) + " of the session is missing");
    return true;
  }

  void resolve(std::uint64_t of, std::optional<std::uint32_t> new_window) {
    std::lock_guard lock(mutex);
    unresolved.erase(of);
    window = new_window.value_or(window);
    changed.notify_all();
  }

  /// Let senders that wait for a credit go.
  void end() {
    std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }

  /// Send a frame whose credit is taken under `sending`.
  std::uint64_t send(Frame& frame, std::unique_lock<std::mutex> lock) {
    if (frame.stamp.sequence == 0) frame.stamp.sequence = sequence + 1;
    sequence = frame.stamp.sequence;
    unresolved.insert(sequence);
    lock.unlock();
    write(with_image(message_of(frame), v1::Frame::kImageFieldNumber, frame.image, v1::SessionRequest::kFrameFieldNumber));
    return frame.stamp.sequence;
  }

  void write(const grpc::ByteBuffer& message) {
    if (!call->write(message)) throw failure(Code::UNAVAILABLE, "the session has ended: next() has the reason");
  }

  /// Note what a message says of credits, and return its value, if it has one.
  std::optional<SessionEvent> read(const v1::SessionResponse& message) {
    switch (message.message_case()) {
      case v1::SessionResponse::kAccepted: {
        const auto& accepted = message.accepted();
        resolve(accepted.sequence(), accepted.frame_credits());
        return FrameAccepted{accepted.sequence()};
      }
      case v1::SessionResponse::kDropped: {
        const auto& dropped = message.dropped();
        resolve(dropped.sequence(), dropped.frame_credits());
        return FrameDropped{dropped.sequence(), static_cast<DropReason>(dropped.reason()), dropped.dropped_total()};
      }
      case v1::SessionResponse::kResult: {
        const auto& result = message.result();
        resolve(result.stamp().sequence(), {});  // a result says accepted too
        Info info;
        info.model = terms.model();
        info.stamp = value_of(result.stamp());
        info.image_id = result.image().image_id();
        info.image_width = result.image().width();
        info.image_height = result.image().height();
        return FrameResult{info.stamp, value_of(result.result(), info), result.last_for_frame(), value_of(result.age())};
      }
      case v1::SessionResponse::kHeartbeat:
        return Heartbeat{};
      case v1::SessionResponse::kGoAway: {
        const auto left = value_of(message.go_away().time_left());
        return GoAway{std::chrono::duration_cast<std::chrono::milliseconds>(left), value_of(message.go_away().reason())};
      }
      default:
        return std::nullopt;
    }
  }
};

Session Client::open_session(const SessionConfig& config) const {
  auto state = std::make_unique<Session::State>();
  state->call = connection_->start("legato.v1.SessionService/Session", config.metadata, {});
  state->call->write(buffer_of(open_of(config)));
  const auto until = Clock::now() + connection_->options.timeout;
  v1::SessionResponse first;
  if (!state->receive(first, until)) {
    const grpc::Status status = state->call->finish();
    if (status.error_code() == Code::CANCELLED && Clock::now() >= until)
      throw failure(Code::DEADLINE_EXCEEDED, "the server did not open the session in time");
    throw Error(status);
  }
  if (!first.has_opened()) throw failure(Code::INTERNAL, "the session did not begin with its terms");
  state->terms = first.opened();
  state->window = first.opened().frame_credits();
  return Session(std::move(state));
}

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

const std::string& Session::id() const { return state_->terms.session_id(); }
const std::string& Session::model() const { return state_->terms.model(); }

std::uint32_t Session::credits() const {
  std::lock_guard lock(state_->mutex);
  const auto used = static_cast<std::uint32_t>(state_->unresolved.size());
  return state_->window - std::min(state_->window, used);
}

std::uint64_t Session::send(Frame frame) {
  std::lock_guard one_at_a_time(state_->sending);
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->has_credit() || state_->ended; });
  return state_->send(frame, std::move(lock));
}

std::optional<std::uint64_t> Session::try_send(Frame frame) {
  std::lock_guard one_at_a_time(state_->sending);
  std::unique_lock lock(state_->mutex);
  if (!state_->has_credit() && !state_->ended) return std::nullopt;
  return state_->send(frame, std::move(lock));
}

void Session::cancel_frame(std::uint64_t sequence) {
  v1::SessionRequest request;
  request.mutable_cancel()->set_sequence(sequence);
  state_->write(buffer_of(request));
}

void Session::update(const std::vector<Task>& tasks) {
  v1::SessionRequest request;
  request.mutable_update();
  for (const Task& task : tasks) *request.mutable_update()->add_standing_tasks() = legato::message_of(task);
  state_->write(buffer_of(request));
}

void Session::grant(std::uint32_t answers) {
  v1::SessionRequest request;
  request.mutable_grant()->set_responses(answers);
  state_->write(buffer_of(request));
}

std::optional<SessionEvent> Session::next() {
  v1::SessionResponse message;
  try {
    while (state_->receive(message))
      if (auto event = state_->read(message)) return event;
  } catch (const Error&) {
    state_->end();
    throw;
  }
  state_->end();
  if (const grpc::Status status = state_->call->finish(); !status.ok()) throw Error(status);
  return std::nullopt;
}

void Session::finish() { state_->call->writes_done(); }
void Session::cancel() { state_->call->cancel(); }

}  // namespace legato

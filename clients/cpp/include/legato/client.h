#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "legato/error.h"
#include "legato/values.h"

namespace legato {

/// How to reach a server.
struct ClientOptions {
  /// Encrypt, and check the server against `ca` (PEM text), or the system's authorities where that is empty.
  bool tls = false;
  std::string ca;
  /// Client certificate and key (PEM text), where the server asks for them.
  std::string certificate, key;
  /// Bearer token of every call. Without TLS it is sent to this host only.
  std::string token;
  /// Limit of unary calls, and of the opening of a session.
  std::chrono::milliseconds timeout{60'000};
  /// Limit of Generate.
  std::chrono::milliseconds stream_timeout{600'000};
  /// Largest message that is received.
  int max_message_bytes = 32 << 20;
};

/// Options of one call; those not given are the server's defaults.
struct CallOptions {
  std::string model = {};
  std::string adapter = {};
  std::string request_id = {};
  FrameStamp stamp = {};
  /// Limit of this call instead of the client's.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::multimap<std::string, std::string> metadata = {};
};

// ---------------------------------------------------------------- events of Generate

struct Queued {
  std::uint32_t position = 0;
};
struct Started {
  std::string model, request_id;
};
struct TextDelta {
  std::string text;
};
struct ReasoningDelta {
  std::string text;
};
struct OutlineDelta {
  std::uint32_t index = 0;
  std::string path_delta;
};
struct Heartbeat {};
/// The end: the result again, whole.
struct Finished {
  TaskResult result;
  Info info;
};

using Event =
    std::variant<Queued, Started, TextDelta, ReasoningDelta, Detection, PointedObject, OutlineDelta, Heartbeat, Finished>;

/// Input iterator over what `Source::next()` returns until it is empty.
template <typename Source, typename Value>
class Iterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Value;
  using difference_type = std::ptrdiff_t;
  using pointer = const Value*;
  using reference = const Value&;

  Iterator() = default;
  explicit Iterator(Source* source) : source_(source) { ++*this; }
  reference operator*() const { return *value_; }
  pointer operator->() const { return &*value_; }
  Iterator& operator++() {
    value_ = source_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(const Iterator& other) const { return value_.has_value() == other.value_.has_value(); }
  bool operator!=(const Iterator& other) const { return !(*this == other); }

 private:
  Source* source_ = nullptr;
  std::optional<Value> value_;
};

class Call;
struct Connection;

/// Events of one answer, in order. One thread reads; leaving the stream cancels the request.
class Stream {
 public:
  using iterator = Iterator<Stream, Event>;

  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  /// Wait for the next event; empty after Finished. Throws Error, also where an event is missing.
  std::optional<Event> next();
  iterator begin() { return iterator(this); }
  iterator end() { return {}; }

  /// Cancel the request: next() throws CANCELLED. Any thread may call it.
  void cancel();

 private:
  friend class Client;
  explicit Stream(std::unique_ptr<Call> call);
  std::unique_ptr<Call> call_;
  std::uint64_t index_ = 0;
  bool finished_ = false;
};

// ---------------------------------------------------------------- sessions

/// What happens when frames come faster than answers, numbered as in the contract.
enum class FramePolicy {
  unspecified,
  latest_wins,  ///< One frame waits; a newer one takes its place. The default.
  every_frame,  ///< Frames queue up to the credits.
  preempt,      ///< As latest_wins, and a newer frame stops work on the older one.
};

struct SessionConfig {
  std::string name = {};
  std::string model = {};
  std::string adapter = {};
  /// Tasks of every frame.
  std::vector<Task> tasks = {};
  FramePolicy policy = FramePolicy::unspecified;
  std::uint32_t max_in_flight = 0;
  /// Drop older frames instead of answering late.
  std::optional<std::chrono::milliseconds> max_frame_age = {};
  /// Answers that this client is ready for, extended by Session::grant; 0: any number.
  std::uint32_t response_credits = 0;
  std::multimap<std::string, std::string> metadata = {};
};

/// One image of a session.
struct Frame {
  Image image;
  FrameStamp stamp = {};
  /// Tasks of this frame only, after those of the session.
  std::vector<Task> extra_tasks = {};
  bool skip_standing_tasks = false;
  /// Never drop this frame.
  bool must_run = false;
};

enum class DropReason { unspecified, superseded, too_old, overloaded, cancelled, going_away };

/// The server has the frame's bytes.
struct FrameAccepted {
  std::uint64_t sequence = 0;
};
/// Outcome of a frame that was not worked on.
struct FrameDropped {
  std::uint64_t sequence = 0;
  DropReason reason = DropReason::unspecified;
  /// Frames that this session has lost so far.
  std::uint64_t total = 0;
};
/// Outcome of one task of a frame.
struct FrameResult {
  FrameStamp stamp;
  TaskResult result;
  /// No more results of this frame will come.
  bool last = false;
  /// Time since the frame was captured.
  std::chrono::microseconds age{0};
};
/// The server ends the session soon: open another one.
struct GoAway {
  std::chrono::milliseconds time_left{0};
  Error reason;
};

using SessionEvent = std::variant<FrameAccepted, FrameDropped, FrameResult, Heartbeat, GoAway>;

/// A stream of frames, each with exactly one outcome: results of all its tasks, the last with `last`; or one drop.
/// One thread calls next(); any number of others send.
class Session {
 public:
  using iterator = Iterator<Session, SessionEvent>;

  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  const std::string& id() const;
  const std::string& model() const;

  /// Frames that may be sent now, as far as next() has read.
  std::uint32_t credits() const;
  /// Send a frame once there is a credit for it, and return its sequence. Another thread must be in next().
  std::uint64_t send(Frame frame);
  /// Send a frame if there is a credit for it; empty otherwise.
  std::optional<std::uint64_t> try_send(Frame frame);
  /// Stop a frame: it ends dropped, or with partial results.
  void cancel_frame(std::uint64_t sequence);
  /// Replace the session's tasks, from the next frame on.
  void update(const std::vector<Task>& tasks);
  /// Allow more answers, where SessionConfig::response_credits bounds them.
  void grant(std::uint32_t answers);

  /// Wait for the next event; empty when the session has ended well. Throws Error.
  std::optional<SessionEvent> next();
  iterator begin() { return iterator(this); }
  iterator end() { return {}; }

  /// Say that no more frames will come: what runs is finished, then next() is empty.
  void finish();
  /// Give the session up, with all that runs.
  void cancel();

 private:
  friend class Client;
  struct State;
  explicit Session(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// ---------------------------------------------------------------- client

/// Client of one server, or of all behind one name. Any number of threads may call it. All calls throw Error.
class Client {
 public:
  /// `target` is "host:port", "dns:///name:port" or "unix:/path". Nothing is sent before the first call.
  explicit Client(const std::string& target, ClientOptions options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  QueryResult query(const Image& image, const QueryTask& task, const CallOptions& options = {}) const;
  CaptionResult caption(const Image& image, const CaptionTask& task = {}, const CallOptions& options = {}) const;
  DetectResult detect(const Image& image, const DetectTask& task, const CallOptions& options = {}) const;
  PointResult point(const Image& image, const PointTask& task, const CallOptions& options = {}) const;
  SegmentResult segment(const Image& image, const SegmentTask& task, const CallOptions& options = {}) const;

  /// Stream the answer to one task.
  Stream generate(const Image& image, const Task& task, const CallOptions& options = {}) const;

  Session open_session(const SessionConfig& config) const;

 private:
  std::unique_ptr<Connection> connection_;
};

}  // namespace legato

#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <google/protobuf/message.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include "legato/client.h"

namespace legato {

using Clock = std::chrono::system_clock;

/// Any kind of call: on the wire all of them are bidirectional. One thread may read while others write.
///
/// Messages are byte buffers, so that the pixels of an image need not pass through a protobuf message.
class Call : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  /// Start a call of "package.Service/Method".
  Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
       const std::multimap<std::string, std::string>& metadata, std::optional<Clock::time_point> deadline);
  /// Cancel the call unless it has ended, and wait until gRPC has let go of it.
  ~Call() override;

  /// Send a message; return whether the call still took it.
  bool write(const grpc::ByteBuffer& message);
  /// Half-close the call.
  void writes_done();
  /// Receive a message; return false at the end. After `until`, if given, cancel the call.
  bool read(google::protobuf::Message& into, std::optional<Clock::time_point> until = {});
  /// Status of a call whose read() returned false.
  grpc::Status finish();
  void cancel() { context_.TryCancel(); }

 private:
  /// Progress of one direction: an operation is started, then done.
  struct Operation {
    bool done = false;
    bool ok = false;
  };
  void OnWriteDone(bool ok) override { complete(write_, ok); }
  void OnWritesDoneDone(bool ok) override { complete(write_, ok); }
  void OnReadDone(bool ok) override { complete(read_, ok); }
  void OnDone(const grpc::Status& status) override;
  void complete(Operation& operation, bool ok);
  bool wait(Operation& operation);

  grpc::ClientContext context_;
  std::mutex writing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Operation write_, read_;
  bool half_closed_ = false;
  bool released_ = false;  // the reading thread's own
  std::optional<grpc::Status> status_;
  grpc::ByteBuffer received_;
};

/// Channel of a client, and what all of its calls carry.
struct Connection {
  ClientOptions options;
  std::shared_ptr<grpc::Channel> channel;

  std::unique_ptr<Call> start(const std::string& method, std::multimap<std::string, std::string> metadata,
                              std::optional<Clock::time_point> deadline) const {
    if (!options.token.empty()) metadata.emplace("authorization", "Bearer " + options.token);
    return std::make_unique<Call>(channel, method, metadata, deadline);
  }
};

/// Return a message as gRPC sends it.
grpc::ByteBuffer buffer_of(const google::protobuf::Message& message);

}  // namespace legato

#include "call.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/proto_buffer_reader.h>

namespace legato {

Call::Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
           const std::multimap<std::string, std::string>& metadata, std::optional<Clock::time_point> deadline) {
  for (const auto& [name, value] : metadata) context_.AddMetadata(name, value);
  if (deadline) context_.set_deadline(*deadline);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&context_, "/" + method, {}, this);
  AddHold();  // operations are started by other threads than gRPC's own
  StartCall();
}

Call::~Call() {
  {
    std::lock_guard lock(mutex_);
    if (!status_) context_.TryCancel();
  }
  finish();
}

bool Call::write(const grpc::ByteBuffer& message) {
  std::lock_guard one_at_a_time(writing_);
  if (half_closed_) return false;
  StartWrite(&message);
  return wait(write_);
}

void Call::writes_done() {
  std::lock_guard one_at_a_time(writing_);
  if (std::exchange(half_closed_, true)) return;
  StartWritesDone();
  wait(write_);
}

bool Call::read(google::protobuf::Message& into, std::optional<Clock::time_point> until) {
  if (released_) return false;
  StartRead(&received_);
  if (until) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, *until, [this] { return read_.done; })) context_.TryCancel();
  }
  if (!wait(read_)) return false;
  grpc::ProtoBufferReader reader(&received_);
  if (into.ParseFromZeroCopyStream(&reader) && reader.status().ok()) return true;
  cancel();
  return false;
}

grpc::Status Call::finish() {
  {  // an operation that starts after OnDone would never complete
    std::lock_guard no_write(writing_);
    half_closed_ = true;
    if (!std::exchange(released_, true)) RemoveHold();
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return status_.has_value(); });
  return *status_;
}

void Call::OnDone(const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  status_ = status;
  changed_.notify_all();  // under the lock: the waiting thread may destroy this
}

void Call::complete(Operation& operation, bool ok) {
  std::lock_guard lock(mutex_);
  operation = {true, ok};
  changed_.notify_all();
}

bool Call::wait(Operation& operation) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return operation.done; });
  operation.done = false;
  return operation.ok;
}

grpc::ByteBuffer buffer_of(const google::protobuf::Message& message) {
  grpc::Slice bytes(message.SerializeAsString());
  return grpc::ByteBuffer(&bytes, 1);
}

}  // namespace legato

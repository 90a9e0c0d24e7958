// Runs the list of tests/conformance with gRPC C++ and the stubs; the README there says how it is called and what it
// prints. A JSON document is a google.protobuf.Value.

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/wrappers.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/create_channel.h>

#include "call.h"

namespace {

namespace pb = google::protobuf;
using Json = pb::Value;

// Debian's gRPC C++ brings no stubs of the health service, which the list calls too.
constexpr char kHealth[] = R"(
  name: "grpc/health/v1/health.proto" package: "grpc.health.v1" syntax: "proto3"
  message_type { name: "HealthCheckRequest"
    field { name: "service" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
  message_type { name: "HealthCheckResponse"
    enum_type { name: "ServingStatus" value { name: "UNKNOWN" number: 0 } value { name: "SERVING" number: 1 }
      value { name: "NOT_SERVING" number: 2 } value { name: "SERVICE_UNKNOWN" number: 3 } }
    field { name: "status" number: 1 type: TYPE_ENUM label: LABEL_OPTIONAL
      type_name: ".grpc.health.v1.HealthCheckResponse.ServingStatus" } }
  service { name: "Health"
    method { name: "Check" input_type: ".grpc.health.v1.HealthCheckRequest"
      output_type: ".grpc.health.v1.HealthCheckResponse" }
    method { name: "Watch" input_type: ".grpc.health.v1.HealthCheckRequest"
      output_type: ".grpc.health.v1.HealthCheckResponse" server_streaming: true } }
)";

constexpr const char* kCodes[] = {"OK",
                                  "CANCELLED",
                                  "UNKNOWN",
                                  "INVALID_ARGUMENT",
                                  "DEADLINE_EXCEEDED",
                                  "NOT_FOUND",
                                  "ALREADY_EXISTS",
                                  "PERMISSION_DENIED",
                                  "RESOURCE_EXHAUSTED",
                                  "FAILED_PRECONDITION",
                                  "ABORTED",
                                  "OUT_OF_RANGE",
                                  "UNIMPLEMENTED",
                                  "INTERNAL",
                                  "UNAVAILABLE",
                                  "DATA_LOSS",
                                  "UNAUTHENTICATED"};

/// Messages of all services of the list, by name.
class Contract {
 public:
  Contract() : pool_(pb::DescriptorPool::generated_pool()), messages_(&pool_) {
    messages_.SetDelegateToGeneratedFactory(true);
    pb::FileDescriptorProto health;
    if (!pb::TextFormat::ParseFromString(kHealth, &health) || pool_.BuildFile(health) == nullptr)
      throw std::logic_error("the health service is malformed");
  }

  const pb::MethodDescriptor& method(std::string call) const {
    std::replace(call.begin(), call.end(), '/', '.');
    const pb::MethodDescriptor* found = pool_.FindMethodByName(call);
    if (found == nullptr) throw std::runtime_error("no method " + call);
    return *found;
  }

  std::unique_ptr<pb::Message> make(const pb::Descriptor* kind) {
    return std::unique_ptr<pb::Message>(messages_.GetPrototype(kind)->New());
  }

 private:
  pb::DescriptorPool pool_;
  pb::DynamicMessageFactory messages_;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void parse(const std::string& text, pb::Message& into) {
  const auto status = pb::util::JsonStringToMessage(text, &into);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

std::string print(const pb::Message& message) {
  std::string text;
  const auto status = pb::util::MessageToJsonString(message, &text);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  return text;
}

/// Return a member of an object, or null.
const Json& member(const Json& of, const std::string& name) {
  const auto& fields = of.struct_value().fields();
  const auto found = fields.find(name);
  return found == fields.end() ? Json::default_instance() : found->second;
}

Json& add(Json& step, const std::string& name) {
  return *(*step.mutable_struct_value()->mutable_fields())[name].mutable_list_value()->add_values();
}

const pb::ListValue& messages_of(const Json& step) { return member(step, "messages").list_value(); }

/// Return the value that the last message of a step has at a path.
Json answer(const Json& step, const std::string& path) {
  const auto& messages = messages_of(step).values();
  if (messages.empty()) throw std::runtime_error("no message has " + path);
  Json found = *messages.rbegin();
  std::istringstream names(path);
  for (std::string name; std::getline(names, name, '.');) found = Json(member(found, name));
  return found;
}

/// Return the sum of a stream's checkpoints, as protobuf merges them.
Json checkpoint_of(const Json& step) {
  Json whole;
  auto& sum = *whole.mutable_struct_value()->mutable_fields();
  for (const Json& message : messages_of(step).values()) {
    for (const auto& [name, value] : member(message, "checkpoint").struct_value().fields()) {
      if (value.has_list_value())
        sum[name].mutable_list_value()->MergeFrom(value.list_value());
      else
        sum[name] = value;
    }
  }
  return whole;
}

std::string base64(const std::string& bytes) {
  pb::BytesValue value;
  value.set_value(bytes);
  const std::string quoted = print(value);
  return quoted.substr(1, quoted.size() - 2);
}

/// Return a template with images and earlier responses filled in.
Json fill(const Json& from, const std::string& images, const std::vector<Json>& done) {
  Json filled;
  if (from.has_list_value()) {
    for (const Json& each : from.list_value().values())
      *filled.mutable_list_value()->add_values() = fill(each, images, done);
    return filled;
  }
  if (!from.has_struct_value()) return from;
  const auto step = [&](const Json& number) { return done.at(static_cast<std::size_t>(number.number_value())); };
  if (const Json& file = member(from, "$file"); file.has_string_value()) {
    filled.set_string_value(base64(read_file(images + "/" + file.string_value())));
    return filled;
  }
  if (const Json& number = member(from, "$step"); number.has_number_value())
    return answer(step(number), member(from, "at").string_value());
  if (const Json& number = member(from, "$checkpoint"); number.has_number_value()) return checkpoint_of(step(number));
  filled.mutable_struct_value();
  for (const auto& [name, value] : from.struct_value().fields())
    (*filled.mutable_struct_value()->mutable_fields())[name] = fill(value, images, done);
  return filled;
}

class Runner {
 public:
  Runner(const std::string& address, std::string images)
      : channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())), images_(std::move(images)) {}

  /// Return what was seen of a case, as the README describes it.
  Json run(const Json& one) {
    std::vector<Json> done;
    for (const Json& step : member(one, "steps").list_value().values()) done.push_back(call(step, done));
    Json seen;
    for (const Json& step : done) add(seen, "steps") = step;
    (*seen.mutable_struct_value()->mutable_fields())["case"] = member(one, "name");
    return seen;
  }

 private:
  Json call(const Json& step, const std::vector<Json>& done) {
    const std::string& name = member(step, "call").string_value();
    const pb::MethodDescriptor& method = contract_.method(name);
    std::multimap<std::string, std::string> metadata;
    for (const auto& [key, value] : member(step, "metadata").struct_value().fields())
      metadata.emplace(key, value.string_value());
    const double timeout = member(step, "timeout").number_value();
    const auto limit = std::chrono::milliseconds(timeout > 0 ? static_cast<int>(timeout * 1000) : 60'000);
    legato::Call call(channel_, name, metadata, legato::Clock::now() + limit);
    const Json messages = fill(member(step, "send"), images_, done);
    for (const Json& message : messages.list_value().values()) {
      const auto request = contract_.make(method.input_type());
      parse(print(message), *request);
      if (!call.write(legato::buffer_of(*request))) break;  // the server's reason is still to be received
    }
    call.writes_done();
    return receive(call, method, static_cast<int>(member(step, "cancelAfter").number_value()));
  }

  Json receive(legato::Call& call, const pb::MethodDescriptor& method, int cancel_after) {
    Json seen;
    auto& fields = *seen.mutable_struct_value()->mutable_fields();
    auto& messages = *fields["messages"].mutable_list_value();
    const auto response = contract_.make(method.output_type());
    while (call.read(*response)) {
      if (cancel_after > 0 && messages.values_size() == cancel_after) continue;  // was on its way when it was cancelled
      parse(print(*response), *messages.add_values());
      if (messages.values_size() == cancel_after) call.cancel();
    }
    const grpc::Status status = call.finish();
    fields["code"].set_string_value(kCodes[status.error_code()]);
    google::rpc::Status details;
    details.ParseFromString(status.error_details());
    auto& list = *fields["details"].mutable_list_value();
    for (const auto& detail : details.details()) parse(print(detail), *list.add_values());
    return seen;
  }

  Contract contract_;
  std::shared_ptr<grpc::Channel> channel_;
  std::string images_;
};

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::cerr << "usage: conformance ADDRESS cases.json IMAGES NAME...\n";
    return 2;
  }
  const std::vector<std::string> names(words + 4, words + count);
  try {
    Json cases;
    parse(read_file(words[2]), cases);
    Runner runner(words[1], words[3]);
    for (const Json& one : cases.list_value().values()) {
      const std::string& name = member(one, "name").string_value();
      if (std::find(names.begin(), names.end(), name) != names.end()) std::cout << print(runner.run(one)) << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

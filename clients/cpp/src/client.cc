#include "legato/client.h"

#include <grpcpp/create_channel.h>

#include "call.h"
#include "convert.h"

namespace legato {

namespace {

using Code = grpc::StatusCode;

// Of calls that no server has answered yet.
constexpr char kServiceConfig[] = R"({
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "1s",
    "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]
})";

bool starts_with(const std::string& text, const std::string& prefix) { return text.rfind(prefix, 0) == 0; }

bool is_this_host(const std::string& target) {
  for (const char* prefix : {"localhost:", "127.", "[::1]:", "unix:"})
    if (starts_with(target, prefix)) return true;
  return false;
}

void check(const std::string& target, const ClientOptions& options) {
  for (const char* scheme : {"http:", "https:", "grpc:", "grpcs:"})
    if (starts_with(target, scheme))
      throw failure(Code::INVALID_ARGUMENT, "target: a server is host:port and no URL: " + target);
  if (target.find(':') == std::string::npos)
    throw failure(Code::INVALID_ARGUMENT, "target: a server is host:port, not " + target);
  if (!options.token.empty() && !options.tls && !is_this_host(target))
    throw failure(Code::INVALID_ARGUMENT, "token: it would leave this host unencrypted; set ClientOptions::tls");
}

std::shared_ptr<grpc::ChannelCredentials> credentials_of(const ClientOptions& options) {
  if (!options.tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions files;
  files.pem_root_certs = options.ca;
  files.pem_cert_chain = options.certificate;
  files.pem_private_key = options.key;
  return grpc::SslCredentials(files);
}

/// Return the part of a request that those of all skills have.
template <typename Request, typename AnyTask>
Request request_of(const AnyTask& task, const CallOptions& options) {
  Request request;
  *request.mutable_sampling() = message_of(task.sampling);
  *request.mutable_options() = message_of(options);
  *request.mutable_stamp() = message_of(options.stamp);
  return request;
}

template <typename Response, typename Request>
auto invoke(const Connection& connection, const std::string& method, const Image& image, const Request& request,
            const CallOptions& options) {
  const auto deadline = Clock::now() + options.timeout.value_or(connection.options.timeout);
  const auto call = connection.start("legato.v1.InferenceService/" + method, options.metadata, deadline);
  if (call->write(with_image(request, Request::kImageFieldNumber, image))) call->writes_done();
  Response response, more;
  const bool answered = call->read(response);
  while (call->read(more)) {}
  if (const grpc::Status status = call->finish(); !status.ok()) throw Error(status);
  if (!answered) throw failure(Code::INTERNAL, method + " ended without a response");
  return value_of(response);
}

template <typename From, typename Request>
void set_limits(const From& from, Request& to) {
  to.set_object(from.object);
  if (from.max_objects) to.set_max_objects(*from.max_objects);
  if (from.min_confidence) to.set_min_confidence(*from.min_confidence);
}

}  // namespace

Client::Client(const std::string& target, ClientOptions options) {
  check(target, options);
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix("legato-cpp/" LEGATO_VERSION);
  arguments.SetServiceConfigJSON(kServiceConfig);
  arguments.SetMaxReceiveMessageSize(options.max_message_bytes);
  auto channel = grpc::CreateCustomChannel(target, credentials_of(options), arguments);
  connection_ = std::make_unique<Connection>(Connection{std::move(options), std::move(channel)});
}

Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

QueryResult Client::query(const Image& image, const QueryTask& task, const CallOptions& options) const {
  auto request = request_of<v1::QueryRequest>(task, options);
  fill_query(task, request);
  return invoke<v1::QueryResponse>(*connection_, "Query", image, request, options);
}

CaptionResult Client::caption(const Image& image, const CaptionTask& task, const CallOptions& options) const {
  auto request = request_of<v1::CaptionRequest>(task, options);
  request.set_length(static_cast<v1::CaptionLength>(task.length));
  return invoke<v1::CaptionResponse>(*connection_, "Caption", image, request, options);
}

DetectResult Client::detect(const Image& image, const DetectTask& task, const CallOptions& options) const {
  auto request = request_of<v1::DetectRequest>(task, options);
  set_limits(task, request);
  return invoke<v1::DetectResponse>(*connection_, "Detect", image, request, options);
}

PointResult Client::point(const Image& image, const PointTask& task, const CallOptions& options) const {
  auto request = request_of<v1::PointRequest>(task, options);
  set_limits(task, request);
  return invoke<v1::PointResponse>(*connection_, "Point", image, request, options);
}

SegmentResult Client::segment(const Image& image, const SegmentTask& task, const CallOptions& options) const {
  auto request = request_of<v1::SegmentRequest>(task, options);
  request.set_object(task.object);
  return invoke<v1::SegmentResponse>(*connection_, "Segment", image, request, options);
}

// ---------------------------------------------------------------- Generate

Stream Client::generate(const Image& image, const Task& task, const CallOptions& options) const {
  v1::GenerateRequest request;
  *request.mutable_task() = message_of(task);
  *request.mutable_options() = message_of(options);
  *request.mutable_stamp() = message_of(options.stamp);
  const auto deadline = Clock::now() + options.timeout.value_or(connection_->options.stream_timeout);
  auto call = connection_->start("legato.v1.InferenceService/Generate", options.metadata, deadline);
  if (call->write(with_image(request, v1::GenerateRequest::kImageFieldNumber, image))) call->writes_done();
  return Stream(std::move(call));
}

Stream::Stream(std::unique_ptr<Call> call) : call_(std::move(call)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

std::optional<Event> Stream::next() {
  v1::GenerateResponse message;
  while (call_->read(message)) {
    if (message.index() != index_++)
      throw failure(Code::UNAVAILABLE, "event " + std::to_string(index_ - 1) + " of the stream is missing");
    if (auto event = value_of(message)) {
      finished_ = finished_ || std::holds_alternative<Finished>(*event);
      return event;
    }
  }
  if (const grpc::Status status = call_->finish(); !status.ok()) throw Error(status);
  if (!finished_) throw failure(Code::UNAVAILABLE, "the stream ended before its answer was finished");
  return std::nullopt;
}

void Stream::cancel() { call_->cancel(); }

}  // namespace legato

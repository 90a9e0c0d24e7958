#pragma once

#include <string>
#include <utility>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "google/rpc/status.pb.h"
#include "legato/client.h"
#include "legato/v1/inference.pb.h"
#include "legato/v1/session.pb.h"

namespace legato {

// Between the contract's messages and this library's values.

v1::Task message_of(const Task& task);
/// Fill a QueryTask or a QueryRequest.
template <typename Query>
void fill_query(const QueryTask& from, Query& to);
v1::Sampling message_of(const Sampling& sampling);
v1::FrameStamp message_of(const FrameStamp& stamp);
v1::RequestOptions message_of(const CallOptions& options);

google::protobuf::Duration message_of(std::chrono::milliseconds duration);
std::chrono::microseconds value_of(const google::protobuf::Duration& duration);
QueryResult value_of(const v1::QueryResponse& from);
CaptionResult value_of(const v1::CaptionResponse& from);
DetectResult value_of(const v1::DetectResponse& from);
PointResult value_of(const v1::PointResponse& from);
SegmentResult value_of(const v1::SegmentResponse& from);
TaskResult value_of(const v1::TaskResult& from, Info info);
Info value_of(const v1::ResponseInfo& from);
FrameStamp value_of(const v1::FrameStamp& from);
Error value_of(const google::rpc::Status& from);
/// Return an event's value; empty for one that is newer than this library, or of no use to it.
std::optional<Event> value_of(const v1::GenerateResponse& from);

/// Return an Error that this library raises without asking the server.
Error failure(grpc::StatusCode code, const std::string& message);

/// Return a request with its image as field `image_field`, whose bytes are sent from where they are. With
/// `outer_field` this request is that field of an outer message which has no other.
grpc::ByteBuffer with_image(const google::protobuf::Message& rest, int image_field, const Image& image,
                            int outer_field = 0);

}  // namespace legato

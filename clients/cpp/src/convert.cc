#include "convert.h"

#include <fstream>
#include <iterator>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/time_util.h>

#include "google/rpc/error_details.pb.h"

namespace legato {

namespace pb = google::protobuf;
using pb::util::TimeUtil;

// ---------------------------------------------------------------- errors

namespace {

std::string text_of(const grpc::Status& status) {
  return status.error_message().empty() ? "status " + std::to_string(status.error_code()) : status.error_message();
}

}  // namespace

Error::Error(const grpc::Status& status) : std::runtime_error(text_of(status)), code(status.error_code()) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const pb::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    google::rpc::RequestInfo request;
    if (detail.UnpackTo(&info)) {
      reason = info.reason();
      metadata = {info.metadata().begin(), info.metadata().end()};
    } else if (detail.UnpackTo(&bad)) {
      for (const auto& each : bad.field_violations()) field_violations.push_back({each.field(), each.description()});
    } else if (detail.UnpackTo(&retry)) {
      retry_after = std::chrono::milliseconds(TimeUtil::DurationToMilliseconds(retry.retry_delay()));
    } else if (detail.UnpackTo(&request)) {
      request_id = request.request_id();
    }
  }
}

Error value_of(const google::rpc::Status& from) {
  return Error({static_cast<grpc::StatusCode>(from.code()), from.message(), from.SerializeAsString()});
}

Error failure(grpc::StatusCode code, const std::string& message) { return Error({code, message}); }

// ---------------------------------------------------------------- images

Image Image::encoded(std::string bytes) {
  Image image;
  auto owner = std::make_shared<const std::string>(std::move(bytes));
  image.data_ = owner->data();
  image.size_ = owner->size();
  image.owner_ = std::move(owner);
  return image;
}

Image Image::file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw failure(grpc::StatusCode::INVALID_ARGUMENT, "image: cannot read " + path);
  return encoded(std::move(bytes));
}

Image Image::raw(const PixelLayout& layout, const void* data, std::size_t size, std::shared_ptr<const void> owner) {
  if (!owner) throw failure(grpc::StatusCode::INVALID_ARGUMENT, "image: a raw frame needs an owner of its pixels");
  Image image;
  image.data_ = data;
  image.size_ = size;
  image.owner_ = std::move(owner);
  image.layout_ = layout;
  return image;
}

Image Image::held(std::string image_id) {
  Image image;
  image.image_id_ = std::move(image_id);
  return image;
}

struct ImageAccess {
  /// Return the bytes as a slice that keeps their owner for as long as gRPC holds it.
  static grpc::Slice pixels(const Image& image) {
    auto* owner = new std::shared_ptr<const void>(image.owner_);
    const auto drop = [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); };
    return grpc::Slice(const_cast<void*>(image.data_), image.size_, drop, owner);
  }

  /// Return the message of an image without its bytes.
  static v1::Image message(const Image& image) {
    v1::Image message;
    if (!image.owner_) {
      message.set_image_id(image.image_id_);
    } else if (image.layout_) {
      v1::PixelLayout& layout = *message.mutable_raw()->mutable_layout();
      layout.set_width(image.layout_->width);
      layout.set_height(image.layout_->height);
      layout.set_row_stride_bytes(image.layout_->row_stride);
      layout.set_format(static_cast<v1::PixelFormat>(image.layout_->format));
    } else {
      message.mutable_encoded();
    }
    return message;
  }

  /// Return the message of an image with a copy of its bytes.
  static v1::Image whole_message(const Image& image) {
    v1::Image copy = message(image);
    if (copy.has_raw()) copy.mutable_raw()->set_data(image.data_, image.size_);
    if (copy.has_encoded()) copy.mutable_encoded()->set_data(image.data_, image.size_);
    return copy;
  }

  static bool has_bytes(const Image& image) { return image.owner_ != nullptr; }
  static std::size_t size(const Image& image) { return image.size_; }
};

namespace {

/// Return the tag and the length that stand before a field of `size` bytes.
std::string header(int field, std::size_t size) {
  std::string bytes;
  {
    pb::io::StringOutputStream stream(&bytes);
    pb::io::CodedOutputStream out(&stream);
    out.WriteVarint32(static_cast<std::uint32_t>(field) << 3 | 2);
    out.WriteVarint64(size);
  }
  return bytes;
}

}  // namespace

grpc::ByteBuffer with_image(const pb::Message& rest, int image_field, const Image& image, int outer_field) {
  std::string head = rest.SerializeAsString();
  std::size_t size = head.size();
  std::vector<grpc::Slice> slices;
  if (!image.empty()) {
    const v1::Image message = ImageAccess::message(image);
    std::string inner = message.SerializeAsString();
    std::size_t pixels = 0;
    if (ImageAccess::has_bytes(image)) {  // `data` goes last in its message, so that nothing follows the bytes
      const bool is_raw = message.has_raw();
      const int source = message.source_case();
      const int data = is_raw ? int{v1::RawImage::kDataFieldNumber} : int{v1::EncodedImage::kDataFieldNumber};
      pixels = ImageAccess::size(image);
      inner = (is_raw ? message.raw().SerializeAsString() : std::string()) + header(data, pixels);
      inner = header(source, inner.size() + pixels) + inner;
    }
    head += header(image_field, inner.size() + pixels) + inner;
    size = head.size() + pixels;
  }
  if (outer_field != 0) head = header(outer_field, size) + head;
  slices.emplace_back(head);
  if (ImageAccess::has_bytes(image)) slices.push_back(ImageAccess::pixels(image));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// ---------------------------------------------------------------- to messages

pb::Duration message_of(std::chrono::milliseconds duration) {
  return TimeUtil::MillisecondsToDuration(duration.count());
}

v1::Sampling message_of(const Sampling& sampling) {
  v1::Sampling message;
  if (sampling.temperature) message.set_temperature(*sampling.temperature);
  if (sampling.top_p) message.set_top_p(*sampling.top_p);
  if (sampling.max_tokens) message.set_max_tokens(*sampling.max_tokens);
  if (sampling.seed) message.set_seed(*sampling.seed);
  return message;
}

v1::FrameStamp message_of(const FrameStamp& stamp) {
  v1::FrameStamp message;
  message.set_frame_id(stamp.frame_id);
  message.set_sequence(stamp.sequence);
  if (stamp.capture_time) {
    const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(stamp.capture_time->time_since_epoch());
    *message.mutable_capture_time() = TimeUtil::NanosecondsToTimestamp(since.count());
  }
  return message;
}

v1::RequestOptions message_of(const CallOptions& options) {
  v1::RequestOptions message;
  message.set_model(options.model);
  message.set_adapter(options.adapter);
  message.set_request_id(options.request_id);
  return message;
}

namespace {

template <typename Query>
struct FormatWriter {
  Query& to;

  void operator()(const std::monostate&) const {}
  void operator()(const JsonSchema& from) const { to.mutable_response_format()->set_json_schema(from.text); }
  void operator()(const Regex& from) const { to.mutable_response_format()->set_regex(from.text); }
  void operator()(const Grammar& from) const { to.mutable_response_format()->set_grammar(from.text); }
  void operator()(const Choices& from) const {
    auto& choices = *to.mutable_response_format()->mutable_choices();
    for (const std::string& text : from.texts) choices.add_texts(text);
  }
};

}  // namespace

template <typename Query>
void fill_query(const QueryTask& from, Query& to) {
  to.set_question(from.question);
  to.set_reasoning(from.reasoning);
  for (const QueryImage& each : from.images) {
    auto& added = *to.add_images();
    *added.mutable_image() = ImageAccess::whole_message(each.image);
    if (each.time) *added.mutable_time() = message_of(*each.time);
  }
  std::visit(FormatWriter<Query>{to}, from.response_format);
}

template void fill_query(const QueryTask&, v1::QueryTask&);
template void fill_query(const QueryTask&, v1::QueryRequest&);

namespace {

template <typename From, typename To>
void set_limits(const From& from, To& to) {
  if (from.max_objects) to.set_max_objects(*from.max_objects);
  if (from.min_confidence) to.set_min_confidence(*from.min_confidence);
}

void fill(const QueryTask& from, v1::Task& to) { fill_query(from, *to.mutable_query()); }

void fill(const CaptionTask& from, v1::Task& to) {
  to.mutable_caption()->set_length(static_cast<v1::CaptionLength>(from.length));
}

void fill(const DetectTask& from, v1::Task& to) {
  to.mutable_detect()->set_object(from.object);
  set_limits(from, *to.mutable_detect());
  if (from.tracking) *to.mutable_detect()->mutable_tracking()->mutable_max_unseen() = message_of(*from.tracking);
}

void fill(const PointTask& from, v1::Task& to) {
  to.mutable_point()->set_object(from.object);
  set_limits(from, *to.mutable_point());
}

void fill(const SegmentTask& from, v1::Task& to) { to.mutable_segment()->set_object(from.object); }

}  // namespace

v1::Task message_of(const Task& task) {
  v1::Task message;
  std::visit(
      [&](const auto& each) {
        message.set_task_id(each.id);
        *message.mutable_sampling() = message_of(each.sampling);
        fill(each, message);
      },
      task);
  return message;
}

// ---------------------------------------------------------------- to values

std::chrono::microseconds value_of(const pb::Duration& duration) {
  return std::chrono::microseconds(TimeUtil::DurationToMicroseconds(duration));
}

FrameStamp value_of(const v1::FrameStamp& from) {
  FrameStamp stamp{from.frame_id(), {}, from.sequence()};
  if (from.has_capture_time()) {
    const std::chrono::nanoseconds since(TimeUtil::TimestampToNanoseconds(from.capture_time()));
    stamp.capture_time.emplace(std::chrono::duration_cast<std::chrono::system_clock::duration>(since));
  }
  return stamp;
}

Info value_of(const v1::ResponseInfo& from) {
  Info info;
  info.request_id = from.request_id();
  info.model = from.model();
  info.finish = static_cast<FinishReason>(from.finish_reason());
  info.input_tokens = from.usage().input_tokens();
  info.output_tokens = from.usage().output_tokens();
  info.total = value_of(from.timings().total());
  info.image_id = from.image().image_id();
  info.image_width = from.image().width();
  info.image_height = from.image().height();
  for (const auto& each : from.images()) info.image_ids.push_back(each.image_id());
  info.stamp = value_of(from.stamp());
  return info;
}

namespace {

template <typename From>
std::optional<float> confidence_of(const From& from) {
  return from.has_confidence() ? std::optional<float>(from.confidence()) : std::nullopt;
}

Box value_of(const v1::Box& box) { return {box.x_min(), box.y_min(), box.x_max(), box.y_max()}; }

Detection value_of(const v1::DetectedObject& from) {
  return {value_of(from.box()), from.label(), confidence_of(from), from.track_id()};
}

PointedObject value_of(const v1::PointedObject& from) {
  return {{from.point().x(), from.point().y()}, from.label(), confidence_of(from)};
}

Outline value_of(const v1::Outline& from) {
  return {from.path(), value_of(from.box()), from.label(), confidence_of(from), from.coarse()};
}

template <typename Messages>
auto values_of(const Messages& messages) {
  std::vector<decltype(value_of(*messages.begin()))> values;
  values.reserve(messages.size());
  for (const auto& each : messages) values.push_back(value_of(each));
  return values;
}

}  // namespace

QueryResult value_of(const v1::QueryResponse& from) {
  return {from.answer(), from.reasoning().text(), value_of(from.info())};
}

CaptionResult value_of(const v1::CaptionResponse& from) { return {from.caption(), value_of(from.info())}; }

DetectResult value_of(const v1::DetectResponse& from) { return {values_of(from.objects()), value_of(from.info())}; }

PointResult value_of(const v1::PointResponse& from) { return {values_of(from.points()), value_of(from.info())}; }

SegmentResult value_of(const v1::SegmentResponse& from) { return {values_of(from.segments()), value_of(from.info())}; }

TaskResult value_of(const v1::TaskResult& from, Info info) {
  info.finish = static_cast<FinishReason>(from.finish_reason());
  info.input_tokens = from.usage().input_tokens();
  info.output_tokens = from.usage().output_tokens();
  info.total = value_of(from.timings().total());
  switch (from.result_case()) {
    case v1::TaskResult::kQuery:
      return {from.task_id(), QueryResult{from.query().answer(), from.query().reasoning().text(), info}};
    case v1::TaskResult::kCaption:
      return {from.task_id(), CaptionResult{from.caption().caption(), info}};
    case v1::TaskResult::kDetect:
      return {from.task_id(), DetectResult{values_of(from.detect().objects()), info}};
    case v1::TaskResult::kPoint:
      return {from.task_id(), PointResult{values_of(from.point().points()), info}};
    case v1::TaskResult::kSegment:
      return {from.task_id(), SegmentResult{values_of(from.segment().segments()), info}};
    case v1::TaskResult::kError:
      return {from.task_id(), value_of(from.error())};
    default:
      return {from.task_id(), failure(grpc::StatusCode::UNIMPLEMENTED, "a result newer than this client")};
  }
}

std::optional<Event> value_of(const v1::GenerateResponse& from) {
  switch (from.event_case()) {
    case v1::GenerateResponse::kQueued:
      return Queued{from.queued().position()};
    case v1::GenerateResponse::kStarted:
      return Started{from.started().model(), from.started().request_id()};
    case v1::GenerateResponse::kText:
      return TextDelta{from.text().text()};
    case v1::GenerateResponse::kReasoning:
      return ReasoningDelta{from.reasoning().text()};
    case v1::GenerateResponse::kPoint:
      return value_of(from.point());
    case v1::GenerateResponse::kObject:
      return value_of(from.object());
    case v1::GenerateResponse::kOutline:
      return OutlineDelta{from.outline().index(), from.outline().path_delta()};
    case v1::GenerateResponse::kHeartbeat:
      return Heartbeat{};
    case v1::GenerateResponse::kFinished: {
      const Info info = value_of(from.finished().info());
      return Finished{value_of(from.finished().result(), info), info};
    }
    default:
      return std::nullopt;
  }
}

}  // namespace legato

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "legato/error.h"

namespace legato {

// ---------------------------------------------------------------- images

/// Pixel formats of raw frames, numbered as in the contract.
enum class PixelFormat { rgb8 = 1, bgr8, rgba8, bgra8, mono8, nv12, yuyv };

/// Layout of a raw frame.
struct PixelLayout {
  std::uint32_t width = 0;
  std::uint32_t height = 0;
  PixelFormat format = PixelFormat::rgb8;
  /// Bytes from one row to the next; 0 where rows are adjacent.
  std::uint32_t row_stride = 0;
};

/// An image of a request. Copies share its bytes, and gRPC sends them from where they are.
class Image {
 public:
  /// No image: a question may do without.
  Image() = default;

  /// An image file's bytes: JPEG, PNG, WebP and what else the server decodes.
  static Image encoded(std::string bytes);
  /// An image file; throws Error if it cannot be read.
  static Image file(const std::string& path);
  /// A camera's frame. `owner` keeps `data` alive and unchanged for as long as gRPC needs it: a `shared_ptr` to the
  /// buffer, or to a handle that returns it to the driver. The last reference may be dropped by a thread of gRPC.
  static Image raw(const PixelLayout& layout, const void* data, std::size_t size, std::shared_ptr<const void> owner);
  /// An image that the server holds.
  static Image held(std::string image_id);

  bool empty() const { return !owner_ && image_id_.empty(); }

 private:
  friend struct ImageAccess;
  std::shared_ptr<const void> owner_;
  const void* data_ = nullptr;
  std::size_t size_ = 0;
  std::optional<PixelLayout> layout_;
  std::string image_id_;
};

/// Where and when an image was captured; echoed verbatim in the result.
struct FrameStamp {
  std::string frame_id;
  std::optional<std::chrono::system_clock::time_point> capture_time;
  /// Number of the frame in a session, growing; 0 has Session::send count.
  std::uint64_t sequence = 0;
};

// ---------------------------------------------------------------- tasks

/// Sampling parameters; those not given are the server's defaults.
struct Sampling {
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<std::uint32_t> max_tokens;
  std::optional<std::uint64_t> seed;
};

enum class CaptionLength { unspecified, brief, normal, detailed };

/// JSON of a schema, whose text this is; "{}" is any JSON.
struct JsonSchema {
  std::string text;
};
/// A match of an expression in Rust's syntax.
struct Regex {
  std::string text;
};
/// One of these texts.
struct Choices {
  std::vector<std::string> texts;
};
/// A text of a context-free grammar, in GBNF or Lark.
struct Grammar {
  std::string text;
};
/// Texts that an answer may be; std::monostate: any.
using ResponseFormat = std::variant<std::monostate, JsonSchema, Regex, Choices, Grammar>;

/// An image of a question about several, whose bytes are copied into the request.
struct QueryImage {
  Image image;
  /// Time since the beginning of the clip of which it is a frame; absent: it is no frame.
  std::optional<std::chrono::milliseconds> time = {};
};

/// A question about the image, or without one.
struct QueryTask {
  std::string question;
  bool reasoning = false;
  Sampling sampling = {};
  std::string id = {};
  /// Images in place of that of the call, where the model takes several; not in sessions.
  std::vector<QueryImage> images = {};
  ResponseFormat response_format = {};
};

/// A description of the image.
struct CaptionTask {
  CaptionLength length = CaptionLength::unspecified;
  Sampling sampling = {};
  std::string id = {};
};

/// Boxes around every instance of an object, named by a noun phrase.
struct DetectTask {
  std::string object;
  std::optional<std::uint32_t> max_objects = {};
  std::optional<float> min_confidence = {};
  /// In a session: track the objects, each until it has not been found for this long.
  std::optional<std::chrono::milliseconds> tracking = {};
  Sampling sampling = {};
  std::string id = {};
};

/// Points on every instance of an object.
struct PointTask {
  std::string object;
  std::optional<std::uint32_t> max_objects = {};
  std::optional<float> min_confidence = {};
  Sampling sampling = {};
  std::string id = {};
};

/// An outline of an object.
struct SegmentTask {
  std::string object;
  Sampling sampling = {};
  std::string id = {};
};

using Task = std::variant<QueryTask, CaptionTask, DetectTask, PointTask, SegmentTask>;

// ---------------------------------------------------------------- results

/// A place as fractions of the image's width and height.
struct Point {
  float x = 0, y = 0;
};

/// A box as fractions of the image's width and height.
struct Box {
  float x_min = 0, y_min = 0, x_max = 0, y_max = 0;
};

struct Detection {
  Box box;
  std::string label;
  std::optional<float> confidence;
  /// Names one physical object in all frames of a session; empty where it is not tracked.
  std::string track_id;
};

struct PointedObject {
  Point point;
  std::string label;
  std::optional<float> confidence;
};

/// Shape of one object.
struct Outline {
  /// SVG path in the unit square of the box.
  std::string path;
  Box box;
  std::string label;
  std::optional<float> confidence;
  /// The decoder's own path, which no refiner improved.
  bool coarse = false;
};

/// Why a task ended, numbered as in the contract.
enum class FinishReason { unspecified, stop, length, max_objects, superseded, cancelled };

/// Facts about an answer beside its result.
struct Info {
  std::string request_id;
  std::string model;
  FinishReason finish = FinishReason::unspecified;
  std::uint32_t input_tokens = 0;
  std::uint32_t output_tokens = 0;
  /// Time on the server.
  std::chrono::microseconds total{0};
  /// Id under which the server holds the image; empty where it does not.
  std::string image_id;
  std::uint32_t image_width = 0, image_height = 0;
  /// Ids of QueryTask::images, in order; empty for other tasks.
  std::vector<std::string> image_ids;
  FrameStamp stamp;
};

struct QueryResult {
  std::string answer;
  /// The model's thoughts before its answer.
  std::string reasoning;
  Info info;
};

struct CaptionResult {
  std::string caption;
  Info info;
};

struct DetectResult {
  std::vector<Detection> objects;
  Info info;
};

struct PointResult {
  std::vector<PointedObject> points;
  Info info;
};

struct SegmentResult {
  std::vector<Outline> segments;
  Info info;
};

/// Result of one task of several, or its Error.
struct TaskResult {
  std::string task_id;
  std::variant<Error, QueryResult, CaptionResult, DetectResult, PointResult, SegmentResult> result;
};

}  // namespace legato

#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <grpcpp/support/status.h>

namespace legato {

/// A field of the request and what is wrong with it.
struct FieldViolation {
  std::string field;
  std::string description;
};

/// Failure of a call, or of one task of several.
class Error : public std::runtime_error {
 public:
  /// Read the details that the server attached to a status.
  explicit Error(const grpc::Status& status);

  /// Status code: what a generic program acts on.
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  /// Finer than the code, and stable, such as "QUEUE_FULL"; empty where gRPC itself failed.
  std::string reason;
  /// Limits, actual values and names, for programs.
  std::map<std::string, std::string> metadata;
  std::vector<FieldViolation> field_violations;
  /// When a busy server wants to be asked again.
  std::optional<std::chrono::milliseconds> retry_after;
  /// Id of the call in the server's log.
  std::string request_id;
};

}  // namespace legato

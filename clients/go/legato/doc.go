// Package legato is a client for Legato, a gRPC server of vision-language models that detect, point, segment,
// caption and answer.
//
//	client, err := legato.Dial("127.0.0.1:50051")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//
//	found, err := client.Detect(ctx, legato.File("street.jpg"), "bicycle")
//	if err != nil {
//		return err
//	}
//	for _, object := range found.Objects {
//		fmt.Println(object.Label, object.Box.Pixels(found.Info.Image.Size()))
//	}
//
// # Pictures
//
// An [Image] is a file ([File]), its bytes ([Bytes], [Reader]), pixels ([Pixels], [Picture]) or a picture that the
// server holds ([Held], see [Client.PutImage]). What cannot be read fails the call that was given it.
//
// # Streams
//
// [Client.Generate] yields events while the answer is made; leaving the loop cancels the request. A [Session] asks the
// same things of every frame of a video. Events and results are always pointers, so a type switch reads
// `case *legato.Detection`.
//
// # Deadlines and retries
//
// A context without a deadline gets one: [DefaultTimeout], and [DefaultStreamTimeout] for Generate. A session has
// none. gRPC retries UNAVAILABLE until the first response; a request that a full server refused is retried after the
// delay that the server gave. The healthy servers of one DNS name are called in turn.
//
// # Encryption and tokens
//
// [WithTLS], [WithCA] and [WithClientCertificate] encrypt the connection. [WithToken], [WithTokenFile] and
// [WithTokenSource] send a token with every call, without TLS to this host only.
//
// # Errors
//
// What a server or the way to it refuses is an [*Error]. It matches the Err values by its code, and every [Reason] by
// its reason:
//
//	if errors.Is(err, legato.ErrBusy) { ... }
//	if errors.Is(err, legato.ReasonImageTooLarge) { ... }
//	if errors.Is(err, context.DeadlineExceeded) { ... }
//
// # Raw access
//
// The contract's own messages and stubs are package legatov1, in the folder v1; [Client.Conn] is what they need.
package legato

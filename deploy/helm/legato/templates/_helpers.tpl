{{- define "legato.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "legato.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "legato.labels" -}}
{{ include "legato.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "legato.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Seconds from SIGTERM to SIGKILL. The kubelet must not kill a server that keeps its own times. */}}
{{- define "legato.grace" -}}
{{- with .Values.drain }}
{{- $needed := int (ceil (addf .delaySeconds .graceSeconds .marginSeconds)) }}
{{- $given := $.Values.terminationGracePeriodSeconds }}
{{- if and (kindIs "invalid" $given | not) (lt (int $given) $needed) }}
{{- fail (printf "terminationGracePeriodSeconds is %d, but drain.delaySeconds, graceSeconds and marginSeconds need %d" (int $given) $needed) }}
{{- end }}
{{- kindIs "invalid" $given | ternary $needed $given }}
{{- end }}
{{- end }}

{{- /* Refuses what the server would refuse, before a pod is made for it. */}}
{{- define "legato.check" -}}
{{- if not (or .Values.insecure (and .Values.tls.secretName (or .Values.tokens.secretName .Values.tls.clientCA))) }}
{{- fail "set tls.secretName, and tokens.secretName or tls.clientCA; or insecure: true where the network is trusted" }}
{{- end }}
{{- if and .Values.tls.clientCA (not .Values.tls.secretName) }}
{{- fail "tls.clientCA needs tls.secretName" }}
{{- end }}
{{- if and (or .Values.model.weights .Values.model.tokenizer) (not .Values.model.volume) }}
{{- fail "model.weights and model.tokenizer are below /models, which needs model.volume" }}
{{- end }}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) }}
{{- fail "gateway.enabled needs gateway.parentRefs" }}
{{- end }}
{{- if and .Values.gateway.enabled .Values.tls.secretName }}
{{- fail "gateway.enabled: the gateway ends TLS and speaks plain HTTP/2 to the pods, so set insecure: true and no tls.secretName" }}
{{- end }}
{{- if .Values.inferencePool.enabled }}
{{- if not .Values.inferencePool.endpointPicker.name }}
{{- fail "inferencePool.enabled needs inferencePool.endpointPicker.name, the picker's service" }}
{{- end }}
{{- if not .Values.metrics.enabled }}
{{- fail "inferencePool.enabled needs metrics.enabled: the endpoint picker reads them" }}
{{- end }}
{{- if .Values.tls.secretName }}
{{- fail "inferencePool.enabled: the gateway speaks plain HTTP/2 to the pods, so set insecure: true and no tls.secretName" }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.enabled (not .Values.autoscaling.prometheus) }}
{{- fail "autoscaling.enabled needs autoscaling.prometheus, the address of Prometheus" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}
{{- end }}
{{- if and (not .Values.metrics.enabled) (or .Values.serviceMonitor.enabled .Values.prometheusRule.enabled .Values.autoscaling.enabled) }}
{{- fail "serviceMonitor, prometheusRule and autoscaling need metrics.enabled" }}
{{- end }}
{{- end }}

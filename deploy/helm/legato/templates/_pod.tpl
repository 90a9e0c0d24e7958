{{- define "legato.args" -}}
- --listen=0.0.0.0:50051
- --health-listen=0.0.0.0:50052
{{- if .Values.metrics.enabled }}
- --metrics-listen=0.0.0.0:9464
{{- end }}
- --model={{ .Values.model.name }}
{{- with .Values.model.weights }}
- --weights=/models/{{ . }}
{{- end }}
{{- with .Values.model.tokenizer }}
- --tokenizer=/models/{{ . }}
{{- end }}
- --drain-delay={{ .Values.drain.delaySeconds }}
- --drain-grace={{ .Values.drain.graceSeconds }}
{{- if .Values.tls.secretName }}
- --tls-cert=/etc/legato/tls/tls.crt
- --tls-key=/etc/legato/tls/tls.key
{{- end }}
{{- if .Values.tls.clientCA }}
- --tls-client-ca=/etc/legato/tls/ca.crt
{{- end }}
{{- if .Values.tokens.secretName }}
- --tokens=/etc/legato/tokens/{{ .Values.tokens.key }}
{{- end }}
{{- if .Values.insecure }}
- --insecure
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "legato.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpu.count }}
{{- $limits := merge (dict .Values.gpu.resourceName .Values.gpu.count) ($resources.limits | default dict) }}
{{- $resources = set $resources "limits" $limits }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* The root is read-only: what the server writes is here. */}}
{{- define "legato.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: kernels
  mountPath: /var/cache/legato
{{- if .Values.model.volume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /etc/legato/tls
  readOnly: true
{{- end }}
{{- if .Values.tokens.secretName }}
- name: tokens
  mountPath: /etc/legato/tokens
  readOnly: true
{{- end }}
{{- end }}

{{- define "legato.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.sizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit }}
- name: kernels
  {{- toYaml (.Values.kernelCache.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- /* The group of the server reads them, nobody else. */}}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.tokens.secretName }}
- name: tokens
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}

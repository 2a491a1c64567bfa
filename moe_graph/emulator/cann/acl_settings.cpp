// Functions that only change how a real device works (saturation, timeouts, profiling, dumps).
// There is nothing to change here, so each accepts and returns success.
#include "error.h"
#include "export.h"

#define ACCEPTED(name)                                         \
  extern "C" CANN_API int name() { return cann::kAclSuccess; } \
  static_assert(true, "a semicolon follows")

ACCEPTED(HcclSetConfig);
ACCEPTED(MsprofRegisterCallback);
ACCEPTED(MsprofReportAdditionalInfo);
ACCEPTED(MsprofReportApi);
ACCEPTED(MsprofReportCompactInfo);
ACCEPTED(aclAppLog);
ACCEPTED(aclSetCompileopt);
ACCEPTED(aclmdlFinalizeDump);
ACCEPTED(aclmdlInitDump);
ACCEPTED(aclmdlSetDump);
ACCEPTED(aclopSetAttrBool);
ACCEPTED(aclopSetAttrDataType);
ACCEPTED(aclopSetAttrFloat);
ACCEPTED(aclopSetAttrInt);
ACCEPTED(aclopSetAttrListBool);
ACCEPTED(aclopSetAttrListFloat);
ACCEPTED(aclopSetAttrListInt);
ACCEPTED(aclopSetAttrListListInt);
ACCEPTED(aclopSetAttrString);
ACCEPTED(aclopStartDumpArgs);
ACCEPTED(aclopStopDumpArgs);
ACCEPTED(aclrtCtxSetSysParamOpt);
ACCEPTED(aclrtGetLastError);
ACCEPTED(aclrtPeekAtLastError);
ACCEPTED(aclrtProcessReport);
ACCEPTED(aclrtSetDeviceSatMode);
ACCEPTED(aclrtSetOpExecuteTimeOut);
ACCEPTED(aclrtSetOpExecuteTimeOutV2);
ACCEPTED(aclrtSetOpWaitTimeout);
ACCEPTED(aclrtSetStreamAttribute);
ACCEPTED(aclrtSetStreamFailureMode);
ACCEPTED(aclrtSetStreamOverflowSwitch);
ACCEPTED(aclrtSetSysParamOpt);
ACCEPTED(aclrtSubscribeReport);
ACCEPTED(aclrtUnSubscribeReport);
